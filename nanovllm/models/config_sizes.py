"""Checks the sizes in config.json before a module is built. headers.py compares them with the checkpoint.

A list as long as the number of layers is made by transformers, and modules by us. So a number that is far too large
would take all memory, or run for hours, before any tensor showed that it is wrong.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanovllm.utils.checks import as_number, quote

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MOST_POSITIONS = (1 << 31) - 1
"""The most positions: they have 32 bits."""

MOST_ROWS = 1 << 20
"""The most positions of a model that does not compute angles from them."""

MOST = {
    "num_hidden_layers": 1 << 11,
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 20,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 12,
    "sliding_window": 1 << 30,
    "num_experts": 1 << 14,
    "num_local_experts": 1 << 14,
    "num_experts_per_tok": 1 << 14,
    "moe_intermediate_size": 1 << 20,
    "shared_expert_intermediate_size": 1 << 20,
    "linear_num_key_heads": 1 << 12,
    "linear_num_value_heads": 1 << 12,
    "linear_key_head_dim": 1 << 12,
    "linear_value_head_dim": 1 << 12,
    "linear_conv_kernel_dim": 1 << 8,
    "num_labels": 1 << 20,  # transformers makes a list of names
    "max_position_embeddings": MOST_POSITIONS,
}
"""The largest value of each size: several times that of any model. 64 bits hold the bytes of a tensor of such sizes."""


def check_limits(data: Mapping[str, Any], names: Mapping[str, str], source: str) -> None:
    """Raise a ValueError for a size beyond its limit, or a number that is not finite, at any level.

    What is no number is left to transformers.

    Args:
        data: the content of config.json, or of a configuration that transformers made of it.
        names: {one of the names above: the name that a family has for it}, for those with another one.
        source: where it comes from, for messages.
    """
    for size, most in MOST.items():
        for name in {size, names.get(size, size)}:
            value = data.get(name)
            for number in value if isinstance(value, list) else (value,):  # some have one for each layer
                if isinstance(number, (int, float)) and number > most:
                    raise ValueError(f"{source}: {name} is {quote(number)}; it must be at most {most}")
    for name, value in data.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{source}: {name} is {value}; it must be finite")
        if isinstance(value, dict):
            check_limits(value, names, source)


def check_positions(config: "PretrainedConfig", source: str) -> None:
    """Raise a ValueError for more positions than the engine, or transformers' code, can count or keep a table of."""
    length = stretch_length(config, source)
    if not length <= MOST_POSITIONS:
        raise ValueError(
            f"{source}: factor times original_max_position_embeddings of the rope parameters is {length:.4g}; it must "
            f"be at most {MOST_POSITIONS}"
        )
    learned = getattr(config, "max_position_embeddings", None)
    if learned is not None and not hasattr(config, "rope_parameters"):
        name = config.attribute_map.get("max_position_embeddings", "max_position_embeddings")
        is_count = isinstance(learned, int) and not isinstance(learned, bool)
        if not is_count or not 1 <= learned <= MOST_ROWS:
            raise ValueError(
                f"{source}: {name} is {quote(learned)}; it must be a whole number from 1 to {MOST_ROWS}, for the model "
                "has a row for each of them"
            )


def stretch_length(config: "PretrainedConfig", source: str = "config.json") -> float:
    """Return the positions that yarn stretches the original length of a model to; 0 where there is no such rope."""
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or rope.get("rope_type") != "yarn":
        return 0.0
    factor, original = (rope.get(name) for name in ("factor", "original_max_position_embeddings"))
    if not original:
        return 0.0
    named = f"{source}: {{}} of the rope parameters"
    return as_number(factor, named.format("factor")) * as_number(original, named.format("original length"))


def check_sizes(config: "PretrainedConfig", source: str) -> None:
    """Raise a ValueError for a size that no model can have, whatever its weights."""
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    # A family whose layers all have experts has no such size, even if config.json names one.
    dense = ("intermediate_size",) if hasattr(type(config), "intermediate_size") else ()
    for name in (*sizes, *dense, "max_position_embeddings"):
        if getattr(config, name) < 1:
            raise ValueError(f"{source}: {name} is {getattr(config, name)}; it must be at least 1")
    heads = config.num_attention_heads
    kv_heads = config.num_key_value_heads
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{source}: {heads} attention heads cannot share {kv_heads} key-value heads evenly")
    if config.head_dim % 2:
        raise ValueError(
            f"{source}: head_dim is {config.head_dim}; the rotation pairs its elements, so it must be even"
        )
