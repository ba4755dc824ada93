"""The recipes of docs/recipes.md work: a patch to which a recipe links does what its steps say, and passes their tests.

A patch that no longer applies is made anew: carry the recipe out by hand, and write `git diff` into the file.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import ROOT

DOCS = ROOT / "docs"
COPIED = ("nanovllm", "tests", "docs", "pyproject.toml")

FAMILY = ["tests/models/test_config_keys.py", "tests/models/test_families.py", "tests/features/test_embed.py"]
PARAMETER = [
    *("tests/models/test_config_keys.py", "tests/api/test_errors.py", "tests/runner/test_sampling.py"),
    "tests/kernels/test_cpu_kernels.py",
]


def find_patch(recipe: str) -> Path:
    """Return the patch to which a section of the page links."""
    section = (DOCS / "recipes.md").read_text().partition(f"\n## {recipe}\n")[2].partition("\n## ")[0]
    (link,) = re.findall(r"\]\((recipes/\S+\.patch)\)", section)
    return DOCS / link


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "files", "chosen", "new"),
    [
        ("Add a dense family", FAMILY, "Granite or factor or config_keys", "GraniteForCausalLM"),
        ("Add a sampling parameter", PARAMETER, "epsilon or recipe or generation or fields", "epsilon_cutoff"),
    ],
)
def test_a_recipe_that_is_carried_out_in_a_copy_passes_the_tests_that_it_names(
    recipe: str, files: list[str], chosen: str, new: str, tmp_path: Path
) -> None:
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    subprocess.run(["git", "apply", "--whitespace=error", find_patch(recipe)], cwd=tmp_path, check=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, "-rA", *files]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout
    assert new in done.stdout, "no test of what is new was run"
