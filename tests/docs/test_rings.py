"""The rings of the package: imports point inwards, and whoever deletes a feature deletes that feature alone."""

import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from helpers.paths import ROOT, TESTS
from helpers.warm import WarmPython

from scripts.check_code import (
    EXCEPTIONS,
    PACKAGE,
    RINGS,
    find_arrows,
    find_imports,
    find_largest_circle,
    find_modules,
    find_outward_arrows,
    find_place,
    write_table,
)


def test_every_import_points_inwards_also_late_ones_and_those_for_types() -> None:
    assert find_outward_arrows() == EXCEPTIONS


def test_no_large_group_of_modules_imports_each_other() -> None:
    assert len(find_largest_circle()) <= 3


def test_the_rings_are_few_and_the_page_of_the_architecture_prints_them() -> None:
    assert len(RINGS) <= 25
    assert write_table() in (ROOT / "docs" / "architecture.md").read_text()


def test_the_stand_in_is_imported_by_its_command_and_its_public_path_alone() -> None:
    arrows = {start for start, end in find_arrows() if end.startswith("apps/standin")}
    assert {start for start in arrows if not start.startswith("apps/standin")} == {"apps/cli", "as_vllm"}


def test_the_first_screen_of_the_package_is_small() -> None:
    """Modules of one import only keep a public path."""
    public = {"as_vllm.py", "lm_eval.py", "ray.py"}
    places = [path for path in PACKAGE.iterdir() if path.name not in ("assets", "__pycache__")]
    files = {path.name for path in places if path.is_file()}
    assert len([path for path in places if path.is_dir()]) <= 9
    assert len(files - public - {"__init__.py", "__main__.py", "py.typed", "version.py"}) <= 9
    for name in public:
        assert (PACKAGE / name).read_text().count("import ") == 1


USES = """
import json
import traceback
import nanovllm
from nanovllm import LLM, SamplingParams

OPTIONS = {"device": "cpu", "attention_backend": "torch", "max_model_len": 128, "max_num_seqs": 4}
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
llm = LLM("tiny-qwen3", **OPTIONS)


def run(model, prompts=("count from 3 to 9",), params=GREEDY):
    for output in model.generate(list(prompts), params, use_tqdm=False):
        assert len(output["token_ids"]) > 0


def run_with(**options):
    with LLM("tiny-qwen3", **{**OPTIONS, **options}) as other:
        run(other)


uses = {
    "prompt": lambda: run(llm),
    "list": lambda: run(llm, ("count from 3 to 9", "what is 5 + 6?", "hello")),
    "penalty": lambda: run(llm, params=SamplingParams(temperature=0.0, max_tokens=4, repetition_penalty=1.2)),
    "chat": lambda: llm.chat([[{"role": "user", "content": "hello"}]], GREEDY, use_tqdm=False),
    "score": lambda: llm.score("count from 3", " to 9", use_tqdm=False),
    "embed": lambda: llm.embed(["hello"], use_tqdm=False),
    "stream": lambda: list(llm.stream(["hello"], GREEDY)),
    "int8": lambda: run_with(quantization="int8"),
    "drafts": lambda: run_with(speculative_config={"method": "ngram", "num_speculative_tokens": 2}),
    "cpu": lambda: run_with(attention_backend="cpu"),
}
failed = {}
for name, use in uses.items():
    try:
        use()
    except Exception:
        failed[name] = traceback.format_exc()
print(nanovllm.__file__)
print(json.dumps(failed))
"""

OWN_USES = {
    "conversations": {"chat"},
    "drafts": {"drafts"},
    "edits": {"penalty"},
    "quantized": {"int8"},
    "scoring": {"score", "embed"},
    "streaming": {"stream"},
}
"""The uses that a feature is for, of the ten that are tried. What is not named here is for none of them."""


def list_removable() -> list[str]:
    """List the folders and files of features, the folder of applications, and the stand-in: no use needs any."""
    places = [path for ring in ("features", "features/families") for path in (PACKAGE / ring).iterdir()]
    names = [path.relative_to(PACKAGE).as_posix() for path in places]
    return [
        "apps",
        "apps/standin",
        *sorted(name for name in names if not name.endswith(("__init__.py", "__pycache__"))),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", list_removable())
def test_whoever_deletes_a_feature_deletes_that_feature_alone(
    warm_python: WarmPython, tmp_path: Path, name: str
) -> None:
    """Ten uses run in a copy of the package without the feature. Only the uses of the feature fail, and they say so."""
    shutil.copytree(PACKAGE, tmp_path / "nanovllm", ignore=shutil.ignore_patterns("__pycache__"))
    place = tmp_path / "nanovllm" / name
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink()
    done = warm_python.run(USES, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    where, failures = done.stdout.splitlines()[-2:]
    assert Path(where).is_relative_to(tmp_path)
    failed = json.loads(failures)
    assert set(failed) == OWN_USES.get(Path(name).stem, set()), "\n".join(failed.values())
    for error in failed.values():
        assert f"this build has no {Path(name).stem}: there is no nanovllm/{name.removesuffix('.py')}" in error


# ---- rings of tests

TESTS_OF = {
    "api/test_async_llm.py": {"apps", "features/streaming"},
    "api/test_lm_eval.py": {"apps"},
    "api/test_mistakes.py": {"features/diagnosis"},
    "api/test_reasoning.py": {"features/parsing"},
    "api/test_stand_in.py": {"apps"},
    "api/test_tool_calls.py": {"features/parsing"},
    "bench": {"apps"},
    "commands": {"apps"},
    "docs/test_estimator.py": {"apps", "features/shapes"},
    "drafts": {"features/drafts"},
    "edits": {"features/edits"},
    "features/test_adapters.py": {"features/renewal"},
    "gguf": {"features/gguf", "features/quantized"},
    "gpu/test_gpu_features.py": {"features/drafts"},
    "jobs": {"apps"},
    "models/test_any_model.py": {"features/families/any_causal"},
    "models/test_experts.py": {"features/families/qwen3_moe"},
    "models/test_lora.py": {"features/adapters"},
    "models/test_qwen3_5.py": {"features/families/qwen3_5"},
    "quantized": {"features/quantized"},
    "ranks": {"features/distributed"},
    "ranks/test_pipeline.py": {"features/shapes"},
    "robustness/test_attack_jobs.py": {"apps"},
    "robustness/test_attack_kills.py": {"apps"},
    "robustness/test_attack_options.py": {"apps"},
    "robustness/test_attack_ranks.py": {"features/distributed"},
    "robustness/test_claim.py": {"features/sharing"},
    "robustness/test_moved_results.py": {"apps"},
    "runner/test_launches.py": {"features/distributed"},
    "view": {"apps"},
}
"""The features that a file, or a folder, of tests is for: it goes with each of them. All others need no feature."""

DEVICES_OF_FEATURES = {
    "features/edits",
    "features/quantized",
    "features/families/qwen3_5",
    "features/families/qwen3_moe",
}
"""A device has kernels for these features. So tests of its kernels, but for those named here, may need them."""
TESTS_OF_DEVICES = ("kernels", "gpu", "runner/test_launches.py")
PLAIN_KERNELS = (
    "backends",
    "cpu_kernels",
    "few_rows",
    "following_chunks",
    "kernels",
    "kernels_compile",
    "scratch",
    "team",
)


def find_feature(module: str) -> str | None:
    """Return what is deleted as one thing: the applications, or the feature or family of a module; None for others."""
    path = find_place(module)
    parts = path.split("/")
    if parts[0] in ("apps", "as_vllm", "lm_eval", "ray", "__main__"):
        return "apps"
    if parts[0] != "features" or parts in (["features"], ["features", "families"]):
        return None
    return "/".join(parts[: 3 if parts[1] == "families" else 2])


@cache
def list_modules() -> dict[str, Path]:
    return find_modules(PACKAGE) | find_modules(TESTS / "helpers")


@cache
def list_early_imports(file: Path) -> set[str]:
    return {found.module for found in find_imports(file, list_modules()) if found.is_early}


def find_needs(file: Path) -> set[str]:
    """Return the features without which a file of tests cannot be imported: by imports outside of functions."""
    needs = set()
    seen = set()
    waiting = [file]
    while waiting:
        for module in list_early_imports(waiting.pop()) - seen:
            seen.add(module)
            feature = find_feature(module) if module.startswith("nanovllm") else None
            if feature is None:
                waiting.append(list_modules()[module])
            else:
                needs.add(feature)
    return needs


def list_own(name: str) -> set[str]:
    """Return the features that a file of tests may need."""
    own = {one for place, features in TESTS_OF.items() if name.startswith(place) for one in features}
    is_plain = name in [f"kernels/test_{plain}.py" for plain in PLAIN_KERNELS]
    return own | DEVICES_OF_FEATURES if name.startswith(TESTS_OF_DEVICES) and not is_plain else own


def test_whoever_deletes_a_feature_deletes_its_own_tests_alone() -> None:
    files = {path.relative_to(TESTS).as_posix(): path for path in sorted(TESTS.rglob("test_*.py"))}
    needs = {name: find_needs(path) for name, path in files.items()}
    assert {name: found for name in files if (found := needs[name] - list_own(name))} == {}
    for place, features in TESTS_OF.items():
        assert features <= {one for name in files if name.startswith(place) for one in needs[name]}, f"{place} changed"


@pytest.mark.slow
def test_without_any_feature_all_other_tests_can_be_imported(tmp_path: Path) -> None:
    """But for some of benchmarks and pages, which use every feature."""
    for name in ("nanovllm", "tests", "scripts", "benchmarks", "docs", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "bench.py", "example.py"):
        shutil.copy(ROOT / name, tmp_path)
    gone = [tmp_path / "nanovllm" / name for name in (*list_removable(), "ray.py", "lm_eval.py", "as_vllm.py")]
    for place in gone:
        if place.is_dir():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    broken = set(re.findall(r"^ERROR tests/(\S+)", done.stdout, re.MULTILINE))
    own = {path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py") if find_needs(path)}
    assert own <= broken and len(broken) < 80, done.stdout[-3000:]
    assert {name for name in broken - own if not name.startswith(("bench/", "docs/", "gpu/"))} == set()
