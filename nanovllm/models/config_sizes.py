"""Checks the sizes of a config.json before a module is built: their range, and that they are those of the checkpoint.

A list as long as the number of layers is made by transformers, and modules by us. So a number that is far too large
would take all memory, or run for hours, before any tensor showed that it is wrong.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanovllm.utils.checks import quote

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from nanovllm.models.headers import Headers

MOST = {
    "num_hidden_layers": 1 << 11,
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 20,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 12,
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

SHAPES = (
    ("model.embed_tokens.weight", (("vocab_size",), ("hidden_size",))),
    ("model.norm.weight", (("hidden_size",),)),
    ("self_attn.k_proj.weight", (("num_key_value_heads", "head_dim"), ("hidden_size",))),
    ("self_attn.o_proj.weight", (("hidden_size",), ("num_attention_heads", "head_dim"))),
    ("mlp.down_proj.weight", (("hidden_size",), ("intermediate_size",))),
    ("mlp.experts.0.down_proj.weight", (("hidden_size",), ("moe_intermediate_size",))),
)
"""(end of a tensor's name, the sizes whose product is each of its dimensions). A quantised checkpoint may have the
tensor in another form, and then without this name."""


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


def compare_sizes(config: "PretrainedConfig", headers: "Headers") -> None:
    """Raise a ValueError if a size differs from the checkpoint's.

    The loader compares every tensor's shape. Here the few that show the sizes of all others are compared, because it
    takes no memory and no module. A checkpoint with more layers is left to the loader, which names their tensors.
    """
    asked = config.num_hidden_layers
    num_layers = headers.count_layers()
    if 0 < num_layers < asked:
        raise ValueError(
            f"{headers.folder} lacks tensors: config.json says that num_hidden_layers is {asked}, and the checkpoint "
            f"has the tensors of {num_layers} layers, model.layers.0 to {num_layers - 1}"
        )
    for ending, dimensions in SHAPES:
        name = headers.find_ending(ending)
        if name is None or not all(hasattr(config, size) for sizes in dimensions for size in sizes):
            continue
        wanted = [_multiply(config, sizes) for sizes in dimensions]
        shape = headers.read_shape(name)
        if shape is not None and shape != wanted:
            names = ", ".join(" x ".join(sizes) for sizes in dimensions)
            raise ValueError(
                f"{headers.folder}: tensor {name} has shape {shape}; config.json asks for {wanted} ({names})"
            )


def _multiply(config: "PretrainedConfig", sizes: tuple[str, ...]) -> int:
    product = 1
    for size in sizes:
        product *= int(getattr(config, size))
    return product
