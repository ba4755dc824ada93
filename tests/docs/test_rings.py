"""The rings of the package: imports point inwards, and whoever deletes a feature deletes that feature alone."""

import json
import shutil
from pathlib import Path

import pytest
from helpers.paths import ROOT
from helpers.warm import WarmPython

from scripts.check_code import (
    EXCEPTIONS,
    PACKAGE,
    RINGS,
    find_arrows,
    find_largest_circle,
    find_outward_arrows,
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
