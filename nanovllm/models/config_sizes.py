"""Checks the sizes in config.json before a module is built. headers.py compares them with the checkpoint.

A list as long as the number of layers is made by transformers, and modules by us. So a number that is far too large
would take all memory, or run for hours, before any tensor showed that it is wrong.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanovllm.utils.checks import quote

if TYPE_CHECKING:
    from transformers import PretrainedConfig

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
}
"""The largest value of each size: several times that of any model. 64 bits hold the bytes of a tensor of such sizes."""


def check_limits(data: Mapping[str, Any], source: str) -> None:
    """Raise a ValueError for a size beyond its limit. What is no number is left to transformers.

    Args:
        data: the content of config.json.
        source: where it comes from, for messages.
    """
    for name, most in MOST.items():
        value = data.get(name)
        if isinstance(value, (int, float)) and value > most:
            raise ValueError(f"{source}: {name} is {quote(value)}; it must be at most {most}")


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
