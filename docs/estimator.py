"""Writes the numbers of the estimator's page, docs/estimator.json: python -m docs.estimator

All bytes come from `nanovllm estimate`, and the operations from the benchmark's count of a step. The page multiplies.
"""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanovllm.apps.estimate import Estimate, estimate
from nanovllm.apps.floor import Machine, Model, count_expert, step_cost
from nanovllm.config import EngineConfig
from nanovllm.features.shapes import PRESETS, preset_config
from nanovllm.models.model_config import load_model_config
from nanovllm.runner.resolve import read_dtype

NUMBERS = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).with_suffix(".html")
DTYPES = ("bfloat16", "float32")
NUMBERS_OF_GPUS = (1, 2, 4, 8)
"""So many GPUs may share a model, by tensor parallelism."""
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
WEIGHTS: dict[str, tuple[dict[str, Any], str | None]] = {
    "plain": ({}, None),
    "int8": ({}, "int8"),
    "4 bits": ({"quantization_config": AWQ}, None),
}
"""How weights are stored: what config.json has for it, and the option quantization."""


@functools.cache
def run_estimate(name: str, weights: str, dtype: str, ranks: int = 1, max_num_seqs: int = 1) -> Estimate:
    """Return the estimate of a preset with steps of 2 tokens, for GPUs in which everything fits.

    Raises:
        ValueError: so many GPUs cannot share the model.
    """
    keys, quantization = WEIGHTS[weights]
    hf_config = load_model_config(preset_config(name) | keys, name)
    config = EngineConfig(
        name,
        dtype=dtype,
        quantization=quantization,
        tensor_parallel_size=ranks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=2,
    )
    return estimate(hf_config, config, 1 << 50)


def describe_preset(
    name: str, dtypes: Sequence[str] = DTYPES, numbers_of_gpus: Sequence[int] = NUMBERS_OF_GPUS
) -> dict[str, Any]:
    """Return what the page multiplies.

    `unread` are parameters that a decode does not read, because they belong to an embedding that is not the LM head.
    By their types: how weights are stored, and what each of so many GPUs holds.
    """
    hf_config = load_model_config(preset_config(name), name)
    model = Model(hf_config, read_dtype(hf_config))
    numbers: dict[str, Any] = {
        "id": PRESETS[name],
        "context": hf_config.max_position_embeddings,
        "parameters": model.sizes.num_parameters,
        "unread": 0 if hf_config.tie_word_embeddings else model.vocabulary_parameters,
        "experts": None,
    }
    for expert in model.experts[:1]:  # all have the same sizes
        num_experts = hf_config.num_experts
        parameters = num_experts * count_expert(expert) * len(model.experts)
        numbers["experts"] = {"parameters": parameters, "number": num_experts, "chosen": model.experts_per_token}
    for dtype in dtypes:
        numbers[dtype] = {
            "formats": {weights: run_estimate(name, weights, dtype).format for weights in WEIGHTS},
            "gpus": {str(ranks): describe_share(name, dtype, ranks) for ranks in numbers_of_gpus},
        }
    nothing = Machine(1, 1, 1)
    first = step_cost(model, nothing, [(0, 1)], 1).flops
    second = step_cost(model, nothing, [(1, 1)], 1).flops
    numbers["operations"] = {"token": 2 * first - second, "context": second - first}
    return numbers


def describe_share(name: str, dtype: str, ranks: int) -> dict[str, Any] | str:
    """Return what one of `ranks` GPUs holds, or why so many cannot share the model.

    Bytes: `weights`, of one token `kv`, and of one row `state`. `activation`, of one token of a step, and `logits`, of
    one sequence, follow from two estimates.
    """
    try:
        weights = {weights: run_estimate(name, weights, dtype, ranks).memory.weights for weights in WEIGHTS}
    except ValueError as error:
        return str(error)
    small = run_estimate(name, "plain", dtype, ranks)
    wider = run_estimate(name, "plain", dtype, ranks, max_num_seqs=2)
    logits = wider.memory.activations - small.memory.activations
    return {
        "weights": weights,
        "kv": small.kv_bytes_per_token,
        "state": wider.memory.states - small.memory.states,
        "activation": (small.memory.activations - logits) // 2,
        "logits": logits,
    }


def render_estimator() -> str:
    """Return the estimator: HTML with its style, its script and its numbers, to be put into a page."""
    return PAGE.read_text(encoding="utf-8").replace("NUMBERS", NUMBERS.read_text(encoding="utf-8").strip(), 1)


def main() -> None:
    numbers = {name: describe_preset(name) for name in PRESETS}
    lines = (f"{json.dumps(name)}: {json.dumps(values)}" for name, values in numbers.items())
    NUMBERS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
