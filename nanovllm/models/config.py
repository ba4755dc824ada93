"""Reads config.json, refuses what this engine would compute differently, and derives the sizes of the model."""

import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from nanovllm.layers.parallel import Parallel
from nanovllm.models.config_keys import check_keys
from nanovllm.utils.checks import quote, refuse
from nanovllm.utils.integers import ceil_div

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Family:
    """The features that differ between families of decoders.

    Attributes:
        config_class: the name of transformers' class.
        qkv_bias, o_bias: whether the projections have biases; None: as `attention_bias` says.
        qk_norm: whether each query and key head is normed before the rotation.
        is_hybrid: whether `layer_types` may name layers with a state per row, whose attention has a gate beside them.
    """

    config_class: str
    qkv_bias: bool | None
    o_bias: bool | None
    qk_norm: bool
    is_hybrid: bool = False


QWEN3_5 = Family("Qwen3_5TextConfig", qkv_bias=None, o_bias=None, qk_norm=True, is_hybrid=True)
FAMILIES = {
    "Qwen3ForCausalLM": Family("Qwen3Config", qkv_bias=None, o_bias=None, qk_norm=True),
    "Qwen3MoeForCausalLM": Family("Qwen3MoeConfig", qkv_bias=None, o_bias=None, qk_norm=True),
    "Qwen2ForCausalLM": Family("Qwen2Config", qkv_bias=True, o_bias=False, qk_norm=False),
    "LlamaForCausalLM": Family("LlamaConfig", qkv_bias=None, o_bias=None, qk_norm=False),
    "MistralForCausalLM": Family("MistralConfig", qkv_bias=False, o_bias=False, qk_norm=False),
    "Qwen3_5ForCausalLM": QWEN3_5,
    "Qwen3_5ForConditionalGeneration": QWEN3_5,
}
"""By architecture, as config.json names it."""

ROPE_TYPES = ("default", "linear", "yarn", "llama3")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds; raises a ValueError with the file's name if it holds none."""
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


def take_text_config(data: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a config.json that describes the decoder of text. In most models it is all of it.

    Where a model has other parts, such as one for pictures, it is nested, and whether the LM head is tied is said
    outside.
    """
    text = data.get("text_config")
    if not isinstance(text, dict):
        return data
    outer = {name: data[name] for name in ("architectures", "tie_word_embeddings", "auto_map") if name in data}
    own = ("dtype", "torch_dtype", "quantization_config", "eos_token_id")
    return {name: data[name] for name in own if name in data} | text | outer


def load_model_config(data: dict[str, Any], source: str) -> "PretrainedConfig":
    """Make and check the configuration that data, the content of config.json, describes.

    Args:
        source: where the content comes from, for error messages.

    Raises:
        ValueError: data has an architecture or a feature that is not implemented, or values that contradict each other.
    """
    import transformers

    data = take_text_config(data)
    architectures = data.get("architectures") or []
    if not isinstance(architectures, list):
        raise ValueError(f"{source}: architectures is {quote(architectures)}; it must be a list")
    # Without its LM head the architecture Qwen3ForCausalLM is called Qwen3Model.
    names = [re.sub("Model$", "ForCausalLM", name) for name in architectures if isinstance(name, str)]
    architecture = next((name for name in names if name in FAMILIES), None)
    if architecture is None:
        named = ", ".join(map(quote, architectures)) or "no architecture"
        raise ValueError(f"{source} names {named}; supported are: {', '.join(FAMILIES)}")
    auto_map = data.get("auto_map") or {}
    if not isinstance(auto_map, dict) or any(str(name).startswith("AutoModel") for name in auto_map):
        raise ValueError(f"{source} has an auto_map: it needs code of its own, and code from models is never run here")
    if compression := data.get("compression_config"):  # its name in older files
        data = {**data, "quantization_config": {"quant_method": "compressed-tensors", **compression}}
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
    check_keys(data, config, source)
    return config


def is_headless(config: "PretrainedConfig") -> bool:
    """Return whether the architecture has no LM head, so that the model can only embed."""
    return not any(name in FAMILIES for name in config.architectures or FAMILIES)


def _check(config: "PretrainedConfig", source: str) -> None:
    def fail(what: str) -> None:
        raise ValueError(f"{source}: {what}")

    family = find_family(config)
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    known = {"full_attention", "linear_attention" if family.is_hybrid else "sliding_attention"}
    if kinds - known or ("sliding_attention" in kinds and not window):
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
    if rope.get("partial_rotary_factor", 1.0) != 1.0 and not family.is_hybrid:
        fail("partial_rotary_factor other than 1 is not supported")
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "intermediate_size")
    for name in (*sizes, "max_position_embeddings"):
        if getattr(config, name) < 1:
            fail(f"{name} is {getattr(config, name)}; it must be at least 1")
    if find_sparse_layers(config):
        k = config.num_experts_per_tok
        experts = config.num_experts
        if not 1 <= k <= experts:
            fail(f"num_experts_per_tok is {k}; it must be from 1 to num_experts, which is {experts}")
        if config.moe_intermediate_size < 1:
            fail(f"moe_intermediate_size is {config.moe_intermediate_size}; it must be at least 1")
    heads = config.num_attention_heads
    kv_heads = config.num_key_value_heads
    if kv_heads < 1 or heads % kv_heads:
        fail(f"{heads} attention heads cannot share {kv_heads} key-value heads evenly")
    if config.head_dim % 2:
        fail(f"head_dim is {config.head_dim}; the rotation pairs its elements, so it must be even")


def find_family(config: "PretrainedConfig") -> Family:
    """Return the family that a configuration belongs to."""
    return next(family for family in FAMILIES.values() if family.config_class == type(config).__name__)


def find_rotary_dim(config: "PretrainedConfig") -> int:
    """Return how many elements of a head rotate: the first ones."""
    return int(config.head_dim * (config.rope_parameters or {}).get("partial_rotary_factor", 1.0))


def find_sparse_layers(config: "PretrainedConfig") -> frozenset[int]:
    """Return the indices of the layers whose MLP is a mixture of experts."""
    if not getattr(config, "num_experts", 0):
        return frozenset()
    step = config.decoder_sparse_step
    dense = config.mlp_only_layers or ()
    return frozenset(i for i in range(config.num_hidden_layers) if i not in dense and (i + 1) % step == 0)


def limit_length(config: "PretrainedConfig", asked: int) -> int:
    """Return the most tokens of a sequence: `asked`, but at most the length that the model is made for.

    Raises:
        ValueError: the model attends to a sliding window, and the length is more than that. It is not implemented.
    """
    rope = config.rope_parameters or {}
    most = int(config.max_position_embeddings)
    if rope.get("rope_type") == "yarn" and rope.get("original_max_position_embeddings"):  # yarn stretches this length
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


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder, of the whole model or of one rank's share of it, and what follows from them."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    sparse_layers: int = 0
    """How many layers have a mixture of experts: `experts` of them, of which `experts_per_token` compute each token."""
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    has_embedding: bool = True
    """Whether the embedding and the LM head are counted; of a pipeline's stages only the first has them."""
    has_norm: bool = True
    """Whether the final norm is counted; of a pipeline's stages only the last has it."""

    @classmethod
    def from_config(cls, config: "PretrainedConfig", stage: Any = None, **more: Any) -> Self:
        """Return the shape of the whole model, or of one stage of a pipeline.

        Args:
            more: the values that a subclass has in addition. The shape of a hybrid is a `HybridShape` (hybrid.py).
        """
        if stage is None:
            from nanovllm.distributed.stages import Stage

            stage = Stage(0, config.num_hidden_layers, config.num_hidden_layers)
        family = find_family(config)
        bias = bool(getattr(config, "attention_bias", False))
        assert cls is not Shape or not family.is_hybrid
        num_sparse = len(find_sparse_layers(config).intersection(range(stage.first, stage.end)))
        return cls(
            hidden=config.hidden_size,
            layers=stage.end - stage.first,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            intermediate=config.intermediate_size,
            vocab=config.vocab_size,
            tied=bool(config.tie_word_embeddings),
            qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
            o_bias=bias if family.o_bias is None else family.o_bias,
            qk_norm=family.qk_norm,
            sparse_layers=num_sparse,
            experts=config.num_experts if num_sparse else 0,
            experts_per_token=config.num_experts_per_tok if num_sparse else 0,
            expert_intermediate=config.moe_intermediate_size if num_sparse else 0,
            has_embedding=stage.is_first,
            has_norm=stage.is_last,
            **more,
        )

    def shard(self, size: int) -> Self:
        """Return the shape of each rank's share. Several ranks may hold the same KV head; the vocabulary is padded.

        Args:
            size: how many ranks share the model.

        Raises:
            ValueError: so many ranks cannot share it evenly.
        """
        first = Parallel(0, size)
        kv_heads = 1 if size % self.kv_heads == 0 else first.shard(self.kv_heads, "num_key_value_heads")[1]
        return replace(
            self,
            heads=first.shard(self.heads, "num_attention_heads")[1],
            kv_heads=kv_heads,
            intermediate=first.shard(self.intermediate, "intermediate_size")[1],
            vocab=ceil_div(self.vocab, size),
            expert_intermediate=first.shard(self.expert_intermediate, "moe_intermediate_size")[1],
        )

    @property
    def group(self) -> int:
        """How many query heads share a KV head."""
        return self.heads // self.kv_heads

    @property
    def attention_layers(self) -> int:
        """How many layers have keys and values."""
        return self.layers

    @property
    def matrices(self) -> tuple[tuple[int, int, int], ...]:
        """(layers, in features, out features) of the matrices of every token: qkv, o, gate and up, down, router."""
        queries = self.heads * self.head_dim
        keys = self.kv_heads * self.head_dim
        dense = self.layers - self.sparse_layers
        return (
            (self.attention_layers, self.hidden, queries + 2 * keys),
            (self.attention_layers, queries, self.hidden),
            (dense, self.hidden, 2 * self.intermediate),
            (dense, self.intermediate, self.hidden),
            (self.sparse_layers, self.hidden, self.experts),
        )

    @property
    def expert_parameters(self) -> int:
        """How many parameters one expert has."""
        return 3 * self.hidden * self.expert_intermediate

    @property
    def num_parameters(self) -> int:
        matrices = sum(count * rows_in * rows_out for count, rows_in, rows_out in self.matrices)
        experts = self.sparse_layers * self.experts * self.expert_parameters
        biases = self.matrices[0][2] * self.qkv_bias + self.hidden * self.o_bias
        vectors = self.attention_layers * (2 * self.head_dim * self.qk_norm + biases)
        vectors += self.hidden * (2 * self.layers + self.has_norm)
        vocabulary = self.vocab * self.hidden * (1 if self.tied else 2) * self.has_embedding
        return matrices + experts + vocabulary + vectors

    def count_bytes(self, itemsize: int) -> int:
        """Return the memory of the weights if none is quantised."""
        return self.num_parameters * itemsize

    def kv_bytes(self, itemsize: int) -> int:
        """Return the bytes of one token's keys and values, in all layers."""
        return 2 * self.attention_layers * self.kv_heads * self.head_dim * itemsize

    def row_bytes(self, itemsize: int) -> int:
        """Return the bytes of the state of one row, in all layers; 0 for most families."""
        return 0
