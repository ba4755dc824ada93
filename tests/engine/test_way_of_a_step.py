"""From `LLM.generate` to the attention operator: how many functions a step passes through, and how long they are."""

import ast
import inspect
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import nanovllm
from nanovllm import LLM, SamplingParams
from nanovllm.backends.cpu.backend import CpuBackend

PACKAGE = Path(nanovllm.__file__).parent
MOST_FRAMES = 12
MOST_LINES = 40


def find_way(attention_backend: str, operator: str = "attend") -> list[tuple[str, str]]:
    """(file, function) of each frame of the package on the stack where an operator begins, outermost first.

    The operator itself is the last one. Of all calls of a run, the one with the most frames. Steps are eager: a
    recorded one passes through one function more, once for each size.
    """
    ways: list[list[tuple[str, str]]] = []
    options: dict[str, Any] = {"max_model_len": 64, "num_kvcache_blocks": 8, "device": "cpu", "enforce_eager": True}
    with LLM("tiny-qwen3", attention_backend=attention_backend, **options) as llm:
        backend = llm.engine.runner.backend  # type: ignore[attr-defined]
        compute = getattr(backend, operator)

        def watch(*arguments: Any) -> Any:
            way = [(inspect.getsourcefile(compute) or "", operator)]
            frame: FrameType | None = sys._getframe(1)
            while frame is not None:
                if Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
                    way.append((frame.f_code.co_filename, frame.f_code.co_qualname))
                frame = frame.f_back
            ways.append(way[::-1])
            return compute(*arguments)

        setattr(backend, operator, watch)
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False)
    return max(ways, key=len)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_a_step_passes_through_few_functions(backend: str) -> None:
    if backend == "cpu" and (reason := CpuBackend.why_cannot(torch.device("cpu"))):
        pytest.skip(reason)
    names = [name for _, name in find_way(backend)]
    names = names[names.index("LLM.generate") :]
    assert names[-2:] == ["Attention.forward", "attend"]
    assert len(names) <= MOST_FRAMES, names


def test_no_function_on_the_way_of_a_step_is_long() -> None:
    for file, name in find_way("torch")[:-1]:
        functions = [
            node
            for node in ast.walk(ast.parse(Path(file).read_text()))
            if isinstance(node, ast.FunctionDef) and node.name == name.rpartition(".")[2]
        ]
        assert functions, (file, name)
        for function in functions:
            assert function.end_lineno is not None
            num_lines = function.end_lineno - function.lineno + 1
            assert num_lines <= MOST_LINES, f"{name} of {file} has {num_lines} lines"


@pytest.mark.parametrize("operator", ["attend", "sample"])
def test_the_reading_list_has_every_file_that_a_step_passes_through(operator: str) -> None:
    """The list of the README: from `LLM.generate` to the references of attention and of the sampler."""
    readme = (PACKAGE.parent / "README.md").read_text()
    (paragraph,) = re.findall(r"^\*\*Read these .*?\n\n", readme, re.MULTILINE | re.DOTALL)
    listed = set(re.findall(r"\((nanovllm/[\w/]+\.py)\)", paragraph))
    passed = {str(Path(file).relative_to(PACKAGE.parent)) for file, _ in find_way("torch", operator)}
    assert passed <= listed
    assert len(listed) <= 14
    assert not [file for file in listed if "import triton" in (PACKAGE.parent / file).read_text()]
