"""Measures upstream nano-vLLM once. An interpreter that has it and flash-attn runs this file, on a GPU.

Its package has the same name as this project's, and `find_package` looks that the right one is imported.
"""

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.rivals.worker import CannotRun, Engine, main

ROOT = Path(__file__).resolve().parents[2]


class NoTokenizer:
    """Stands for the tokenizer: the workload has token ids, and no engine of the comparison decodes its outputs."""

    eos_token_id = -1

    @classmethod
    def from_pretrained(cls, *_: Any, **__: Any) -> "NoTokenizer":
        return cls()

    def encode(self, text: str) -> list[int]:
        return [0]

    def decode(self, token_ids: list[int]) -> str:
        return ""


def find_package() -> Any:
    """Import nano-vLLM, and not the package of this project, which the search path has first."""
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != ROOT]
    sys.path.append(str(ROOT))  # last: the ranks of nano-vLLM import this file
    import nanovllm

    if hasattr(nanovllm, "__version__"):  # nano-vLLM's package does not say its version, and ours does
        raise CannotRun("--nano-vllm-python has no nano-vLLM of its own, so it imports this project's package")
    return nanovllm


def load(spec: dict[str, Any], mode: str) -> Engine:
    if spec["device"] != "cuda":
        raise CannotRun("nano-vLLM runs on CUDA devices alone")
    package = find_package()
    from nanovllm.engine import llm_engine

    llm_engine.AutoTokenizer = NoTokenizer  # type: ignore[attr-defined]
    names = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size")
    llm = package.LLM(spec["model"], **{name: spec[name] for name in names if spec[name] is not None})

    def run(workload: dict[str, Any]) -> int:
        params = [
            package.SamplingParams(temperature=spec["temperature"], ignore_eos=True, max_tokens=n)
            for n in workload["output_lens"]
        ]
        outputs = llm.generate(workload["prompts"], params, use_tqdm=False)
        return sum(len(output["token_ids"]) for output in outputs)

    return Engine(run, f"flash-attn {find_version('flash-attn')}")


def find_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of unknown version"


if __name__ == "__main__":
    main(load, {"nano-vllm": find_version("nano-vllm"), "torch": torch.__version__})
