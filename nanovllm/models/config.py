"""Reading config.json, and refusing what would change the mathematics silently."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.utils.checks import quote, refuse

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Family:
    """In what one family of dense decoders differs from another.

    Attributes:
        config_class: transformers' name of it.
        qkv_bias, o_bias: whether the projections have biases; None: as `attention_bias` says.
        qk_norm: whether each query and key head is normed before the rotation.
    """

    config_class: str
    qkv_bias: bool | None
    o_bias: bool | None
    qk_norm: bool


FAMILIES = {
    "Qwen3ForCausalLM": Family("Qwen3Config", qkv_bias=None, o_bias=None, qk_norm=True),
    "Qwen3MoeForCausalLM": Family("Qwen3MoeConfig", qkv_bias=None, o_bias=None, qk_norm=True),
    "Qwen2ForCausalLM": Family("Qwen2Config", qkv_bias=True, o_bias=False, qk_norm=False),
    "LlamaForCausalLM": Family("LlamaConfig", qkv_bias=None, o_bias=None, qk_norm=False),
    "MistralForCausalLM": Family("MistralConfig", qkv_bias=False, o_bias=False, qk_norm=False),
}
"""By architecture, as config.json names it."""

ROPE_TYPES = ("default", "linear", "yarn", "llama3")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ValueError with the file's name if it holds none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"), parse_int=_parse_int)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds {type(data).__name__}, not a JSON object")
    return data


def _parse_int(text: str) -> int | float:
    """Return an integer as Python's int if 64 bits hold it, else as a float, which arithmetic never overflows."""
    number = float(text)
    return int(text) if abs(number) < 2**63 else number


def load_model_config(data: dict[str, Any], source: str) -> "PretrainedConfig":
    """Build and check the configuration that config.json's content describes.

    Args:
        source: where the content comes from, for messages.

    Raises:
        ValueError: an architecture or a feature that is not implemented, or values that contradict each other.
    """
    import transformers

    architectures = data.get("architectures") or []
    if not isinstance(architectures, list):
        raise ValueError(f"{source}: architectures is {quote(architectures)}; it must be a list")
    architecture = next((name for name in architectures if isinstance(name, str) and name in FAMILIES), None)
    if architecture is None:
        named = ", ".join(map(quote, architectures)) or "no architecture"
        raise ValueError(f"{source} names {named}; supported are: {', '.join(FAMILIES)}")
    auto_map = data.get("auto_map") or {}
    if not isinstance(auto_map, dict) or any(str(name).startswith("AutoModel") for name in auto_map):
        raise ValueError(f"{source} has an auto_map: it needs code of its own, and code from models is never run here")
    if data.get("quantization_config") or data.get("compression_config"):
        raise ValueError(f"{source} has a quantization_config; only unquantised weights are supported")
    config_class = getattr(transformers, FAMILIES[architecture].config_class)
    if data.get("model_type", config_class.model_type) != config_class.model_type:
        raise refuse(
            data["model_type"], f"{source}: model_type", f'"{config_class.model_type}", as {architecture} has it'
        )
    try:
        config = config_class.from_dict(dict(data))
        if not getattr(config, "head_dim", None):
            config.head_dim = config.hidden_size // config.num_attention_heads
    except Exception as error:  # transformers validates with exceptions of many libraries
        raise ValueError(f"{source} is not a valid {architecture} configuration: {error}") from error
    _check(config, source)
    return config


def _check(config: "PretrainedConfig", source: str) -> None:
    def fail(what: str) -> None:
        raise ValueError(f"{source}: {what}")

    kinds, window = set(getattr(config, "layer_types", None) or ()), getattr(config, "sliding_window", None)
    if kinds - {"full_attention", "sliding_attention"} or ("sliding_attention" in kinds and not window):
        fail(f"layer_types {sorted(map(str, kinds))} with sliding_window {quote(window)} are not supported")
    if config.hidden_act != "silu":
        fail(f"hidden_act is {quote(config.hidden_act)}; only silu is supported")
    if getattr(config, "mlp_bias", False):
        fail("mlp_bias is true; biases in the MLP are not supported")
    rope = config.rope_parameters or {}
    rope_type = rope.get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        fail(f"rope type is {quote(rope_type)}; supported are {', '.join(ROPE_TYPES)}")
    for name, value in rope.items():
        if isinstance(value, float) and not math.isfinite(value):
            fail(f"{name} of the rope parameters is {value}; it must be finite")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        fail("partial_rotary_factor other than 1 is not supported")
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "intermediate_size")
    for name in (*sizes, "max_position_embeddings"):
        if getattr(config, name) < 1:
            fail(f"{name} is {getattr(config, name)}; it must be at least 1")
    if sparse_layers(config):
        k, experts = config.num_experts_per_tok, config.num_experts
        if not 1 <= k <= experts:
            fail(f"num_experts_per_tok is {k}; it must be from 1 to num_experts, which is {experts}")
        if config.moe_intermediate_size < 1:
            fail(f"moe_intermediate_size is {config.moe_intermediate_size}; it must be at least 1")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if kv_heads < 1 or heads % kv_heads:
        fail(f"{heads} attention heads cannot share {kv_heads} key-value heads evenly")
    if config.head_dim % 2:
        fail(f"head_dim is {config.head_dim}; the rotation pairs its elements, so it must be even")


def sparse_layers(config: "PretrainedConfig") -> frozenset[int]:
    """The layers whose MLP is a mixture of experts."""
    if not getattr(config, "num_experts", 0):
        return frozenset()
    step, dense = config.decoder_sparse_step, config.mlp_only_layers or ()
    return frozenset(i for i in range(config.num_hidden_layers) if i not in dense and (i + 1) % step == 0)


def limit_length(config: "PretrainedConfig", asked: int) -> int:
    """The longest sequence, in tokens: what is asked for, but never beyond what the model is made for.

    Raises:
        ValueError: that is more than the window of a model whose attention slides, which is not implemented.
    """
    rope, most = config.rope_parameters or {}, int(config.max_position_embeddings)
    if rope.get("rope_type") == "yarn" and rope.get("original_max_position_embeddings"):  # which yarn stretches
        most = max(most, int(rope["factor"] * rope["original_max_position_embeddings"]))
    length = min(asked, most)
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    if window is not None and window < length and "sliding_attention" in kinds:
        raise ValueError(
            f"the model attends to the last {window} tokens only (sliding_window), which is not supported beyond "
            f"them: max_model_len is {length}; set it to at most {window}"
        )
    return length
