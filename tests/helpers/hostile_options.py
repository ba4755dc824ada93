"""Option values that nobody should pass, and what an engine made with one of them does."""

import math
from typing import Any

import torch

from nanovllm import LLM, SamplingParams

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 4,
    "kvcache_memory_bytes": 8 << 20,
}
HUGE = 10**400


SIZES = [0, 1, 2, 10**6, 10**9, 10**13, 2**31, 2**63 - 1, 2**63, HUGE, -1, 1.5, None, "8", True]


class Awkward:
    """Refuses whatever it is asked."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def item(self) -> float:
        raise RuntimeError("no item")


CONFIGS: dict[str, list[Any]] = {
    "max_model_len": SIZES,
    "max_num_seqs": SIZES,
    "max_num_batched_tokens": SIZES,
    "num_kvcache_blocks": SIZES,
    "kvcache_memory_bytes": SIZES,
    "kvcache_block_size": [0, 1, 24, 2**20, 2**40, 2**64, "16", "x" * 10_000, None, 16.0],
    "tensor_parallel_size": [0, 9, 1.0, True, None, "1", HUGE],
    "pipeline_parallel_size": [0, 9, 1.0, True, None, "1", HUGE],
    "data_parallel_size": [0, -1, 1.0, True, None, "1", HUGE],
    "max_silence": [0, 4, 2**30, 2**30 + 1, 60.0, True, None, "60", HUGE],
    "seed": [-1, 2**63 - 1, 2**63, HUGE, None, "x"],
    "gpu_memory_utilization": [0, 1.5, -1, math.nan, math.inf, "0.5", None, True],
    "dtype": ["x", None, 5, "float64", "half", torch.float32],
    "device": ["meta", "mps", "cpu:99", "cuda:0", "x" * 10_000, None, 5, torch.device("cpu")],
    "attention_backend": ["x", None, "triton"],
    "logprobs_mode": ["x", None, "raw_logits", "processed_logprobs"],
    "quantization": ["x", "", "INT8", "int8_dynamic", "int4", "awq", 8, True, ["int8"], {"int8": 1}, "x" * 10_000],
    "trace": ["/nonexistent/x", "/dev/full", "/tmp", "", 5, "a" * 300, "\0"],
    "model": [
        "",
        "\0",
        "~nosuchuser/x",
        "~",
        "/etc/passwd",
        "..",
        "a" * 5000,
        "/" + "a" * 300,
        "x\n",
        "\ud800",
        "/dev/null",
    ],
}


def short(error: BaseException) -> bool:
    return 0 < len(str(error)) < 1000


def try_config(name: str, value: Any) -> str:
    """Make and use an engine with one option changed; returns what is wrong with how that goes."""
    options = {"model": "tiny-qwen3", **OPTIONS, name: value}
    if name == "num_kvcache_blocks":
        del options["kvcache_memory_bytes"]
    model = options.pop("model")
    try:
        with LLM(model, **options) as llm:
            llm.generate([[5]], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    except ValueError as error:
        return "" if short(error) else f"a message of {len(str(error))} characters"
    except Exception as error:
        return repr(error)[:200]
    return ""
