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

PAGE = (ROOT / "docs" / "recipes.md").read_text()
COPIED = ("nanovllm", "tests", "docs", "pyproject.toml")

OF_KEYS = "tests/models/test_config_keys.py"
OF_MISTAKES = "tests/api/test_errors.py"
PATCHES: dict[str, tuple[list[str], str]] = {
    "granite": (
        [OF_KEYS, "tests/models/test_families.py", "tests/features/test_embed.py"],
        "Granite or factor or config_keys",
    ),
    "epsilon_cutoff": (
        [OF_KEYS, OF_MISTAKES, "tests/runner/test_sampling.py", "tests/kernels/test_cpu_kernels.py"],
        "epsilon or recipe or generation or fields",
    ),
    "top_n_sigma": ([OF_MISTAKES, "tests/edits/test_edit_logits.py"], "top_n_sigma or recipe or preempted-2"),
}
"""The patches, each with files of tests that its recipe names, and what chooses the tests of what is new."""


def test_every_patch_that_the_page_shows_is_tried() -> None:
    shown = re.findall(r"\]\(recipes/(\w+)\.patch\)", PAGE)
    assert sorted(shown) == sorted(PATCHES) == sorted(path.stem for path in (ROOT / "docs" / "recipes").iterdir())


def test_every_name_of_the_page_is_in_the_code() -> None:
    files = [path for folder in ("nanovllm", "tests", "scripts") for path in (ROOT / folder).rglob("*")]
    code = "\n".join(path.read_text() for path in files if path.suffix in (".py", ".h", ".cpp"))
    names = set(re.findall(r"`(?:\w+\.)*(\w+)`", PAGE))
    assert not [name for name in names if name not in code]
    assert len(names) > 50


@pytest.mark.slow
@pytest.mark.parametrize("patch", PATCHES)
def test_a_recipe_that_is_carried_out_in_a_copy_passes_the_tests_that_it_names(patch: str, tmp_path: Path) -> None:
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    apply = ["git", "apply", "--whitespace=error", ROOT / "docs" / "recipes" / f"{patch}.patch"]
    alone = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}  # in a repository, git would skip the copy
    subprocess.run(apply, cwd=tmp_path, env=alone, check=True)
    files, chosen = PATCHES[patch]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, *files]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout
