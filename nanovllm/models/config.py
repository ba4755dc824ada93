"""Reading config.json, and refusing what would change the mathematics silently."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.utils.checks import quote

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ARCHITECTURES = ("Qwen3ForCausalLM",)
ROPE_TYPES = ("default", "linear", "yarn", "llama3")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ValueError with the file's name if it holds none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds {type(data).__name__}, not a JSON object")
    return data


def load_model_config(data: dict[str, Any], source: str) -> "PretrainedConfig":
    """Build and check the configuration that config.json's content describes.

    Args:
        source: where the content comes from, for messages.

    Raises:
        ValueError: an architecture or a feature that is not implemented, or values that contradict each other.
    """
    from transformers import Qwen3Config

    supported = ", ".join(ARCHITECTURES)
    architectures = data.get("architectures") or []
    if not isinstance(architectures, list):
        raise ValueError(f"{source}: architectures is {quote(architectures)}; it must be a list")
    if not any(name in ARCHITECTURES for name in architectures):
        named = ", ".join(map(str, architectures)) or "no architecture"
        raise ValueError(f"{source} names {named}; supported are: {supported}")
    if any(name.startswith("AutoModel") for name in data.get("auto_map") or ()):
        raise ValueError(f"{source} has an auto_map: it needs code of its own, and code from models is never run here")
    if data.get("quantization_config") or data.get("compression_config"):
        raise ValueError(f"{source} has a quantization_config; only unquantised weights are supported")
    try:
        config = Qwen3Config.from_dict(dict(data))
    except Exception as error:  # transformers validates with exceptions of many libraries
        raise ValueError(f"{source} is not a valid {architectures[0]} configuration: {error}") from error
    _check(config, source)
    return config


def _check(config: "PretrainedConfig", source: str) -> None:
    def refuse(what: str) -> None:
        raise ValueError(f"{source}: {what}")

    kinds = set(config.layer_types or ["full_attention"])
    if config.use_sliding_window or kinds != {"full_attention"}:
        refuse(f"layer_types {sorted(kinds)}: only full attention is supported, no sliding windows")
    if config.hidden_act != "silu":
        refuse(f"hidden_act is {quote(config.hidden_act)}; only silu is supported")
    rope = config.rope_parameters or {}
    rope_type = rope.get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        refuse(f"rope type is {quote(rope_type)}; supported are {', '.join(ROPE_TYPES)}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        refuse("partial_rotary_factor other than 1 is not supported")
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "intermediate_size")
    for name in sizes:
        if getattr(config, name) < 1:
            refuse(f"{name} is {getattr(config, name)}; it must be at least 1")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if kv_heads < 1 or heads % kv_heads:
        refuse(f"{heads} attention heads cannot share {kv_heads} key-value heads evenly")


def max_position(config: "PretrainedConfig") -> int:
    """The longest sequence the model is made for, in tokens; yarn stretches the original length by its factor."""
    rope = config.rope_parameters or {}
    length = int(config.max_position_embeddings)
    if rope.get("rope_type") == "yarn" and rope.get("original_max_position_embeddings"):
        length = max(length, int(rope["factor"] * rope["original_max_position_embeddings"]))
    return length
