"""Small random models in GGUF, written by the gguf package, beside transformers' models of the same numbers."""

import json
import random
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from helpers.tiny import save_random

LARGER = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
"""Sizes of which blocks of 256 weights make rows."""
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
SHARED = {"shared_expert_intermediate_size": 256}
SLIDING = {"sliding_window": 16, "num_hidden_layers": 5, "pad_token_id": None}
GEMMA = {"sliding_window": 16, "final_logit_softcapping": 20.0}
GRANITE = {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 3.0}
UNTIED = {"head_dim": ..., "pad_token_id": None, "tie_word_embeddings": False}
HALF = {**UNTIED, "partial_rotary_factor": 0.5}
BIASED = {**UNTIED, "attention_bias": True}
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2ForCausalLM", {"head_dim": ...}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 64}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3moe": ("Qwen3MoeForCausalLM", EXPERTS),
    "qwen2moe": ("Qwen2MoeForCausalLM", {**UNTIED, **EXPERTS, "norm_topk_prob": False, **SHARED}),
    "olmoe": ("OlmoeForCausalLM", {**UNTIED, "num_key_value_heads": 8, "num_experts": 4, "num_experts_per_tok": 2}),
    "llama": ("LlamaForCausalLM", {"tie_word_embeddings": False}),
    "gemma": ("GemmaForCausalLM", {}),
    "gemma2": ("Gemma2ForCausalLM", {**GEMMA, "attn_logit_softcapping": 30.0, "query_pre_attn_scalar": 32}),
    "gemma3": ("Gemma3ForCausalLM", {**GEMMA, "query_pre_attn_scalar": 32, "num_hidden_layers": 7}),
    "granite": ("GraniteForCausalLM", {"head_dim": ..., **GRANITE}),
    "olmo2": ("Olmo2ForCausalLM", {"head_dim": ..., "tie_word_embeddings": False}),
    "phi2": ("PhiForCausalLM", HALF),
    "phi3": ("Phi3ForCausalLM", UNTIED),
    "stablelm": ("StableLmForCausalLM", {**HALF, "use_qkv_bias": True}),
    "starcoder2": ("Starcoder2ForCausalLM", {"head_dim": ..., "use_bias": True, "sliding_window": None}),
    "command-r": ("CohereForCausalLM", {"head_dim": ..., "logit_scale": 0.25, "pad_token_id": None}),
    "cohere2": ("Cohere2ForCausalLM", {**SLIDING, "logit_scale": 0.25}),
    "nemotron": ("NemotronForCausalLM", {"tie_word_embeddings": False}),
    "smollm3": ("SmolLM3ForCausalLM", {"head_dim": ..., "num_hidden_layers": 5, "pad_token_id": None}),
    "arcee": ("ArceeForCausalLM", {}),
    "ernie4_5": ("Ernie4_5ForCausalLM", {}),
    "seed_oss": ("SeedOssForCausalLM", {**BIASED, "head_dim": 32, "attention_out_bias": False}),
    "hunyuan-dense": ("HunYuanDenseV1ForCausalLM", {}),
    "glm4": ("Glm4ForCausalLM", {**BIASED, **HALF, "head_dim": 32}),
}
"""{architecture: transformers' class, and changes of `helpers.tiny.SMALL_MODEL`}."""

NAMED_LIKE = {"mixtral": "llama"}
"""{a model: its architecture in GGUF}, where it has no name of its own."""

PAIRED = ("llama", "granite", "smollm3", "arcee")
"""The architectures whose queries and keys have their rows in pairs."""

SCALES_AT = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208, "Q4_K": 0, "Q5_K": 0, "Q4_1": 0, "Q5_1": 0}
SCALES_AT |= {"Q4_0": 0, "Q5_0": 0, "Q8_0": 0, "IQ4_NL": 0, "IQ4_XS": 0, "IQ3_S": 0, "IQ2_S": 0}
"""{type: where a block has its scale}."""
MIDDLES = {"Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5, "Q4_1": -7.5, "Q5_1": -15.5}
"""{type with a minimum, which stands behind the scale: by how many scales it lies beside 0}."""

Types = Callable[[str], str]
"""Returns the type of a matrix by its name in GGUF."""


def draw_matrix(type_name: str, values: np.ndarray, rng: np.random.Generator, size: float = 0.0) -> np.ndarray:
    """Return a matrix in blocks, uint8 [..., rows, bytes]: random codes, about as large as the values, or as a size."""
    import gguf

    kind = gguf.GGMLQuantizationType[type_name]
    num_weights, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (values.size // num_weights, num_bytes), dtype=np.uint8)

    def put(scale: float) -> None:
        at = SCALES_AT[type_name]
        numbers = [scale, scale * MIDDLES[type_name]] if type_name in MIDDLES else [scale]
        blocks[:, at : at + 2 * len(numbers)] = np.array(numbers, np.float16).view(np.uint8)

    put(1.0)
    put(float((size or values.std()) / gguf.dequantize(blocks[:4096], kind).std()))
    return blocks.reshape(*values.shape[:-1], -1)


def pair_rows(values: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of a head in pairs, as llama.cpp's llama has them."""
    return values.reshape(heads, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)


def part_rows(values: np.ndarray, heads: int) -> np.ndarray:
    """Undo `pair_rows`."""
    return values.reshape(heads, -1, 2, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)


def describe(architecture: str, config: Any) -> dict[str, Any]:
    """Return the keys of the architecture."""
    rope = config.rope_parameters
    if architecture == "gemma3":
        rope = rope["full_attention"]
    found: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "rope.freq_base": float(rope["rope_theta"]),
    }
    for name in ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps"):
        if hasattr(config, name):
            found[f"attention.layer_norm_{'rms_' if 'rms' in name else ''}epsilon"] = getattr(config, name)
    if "partial_rotary_factor" in rope:
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        found["rope.dimension_count"] = int(rope["partial_rotary_factor"] * size)
    if getattr(config, "head_dim", None):
        found |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None):
            found[name] = getattr(config, name)
    sizes = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
    if hasattr(config, "num_local_experts"):
        sizes["expert_count"] = "num_local_experts"
    sizes["expert_feed_forward_length"] = "moe_intermediate_size"
    sizes["expert_shared_feed_forward_length"] = "shared_expert_intermediate_size"
    found |= {key: getattr(config, name) for key, name in sizes.items() if hasattr(config, name)}
    if architecture in ("command-r", "cohere2"):
        found["logit_scale"] = config.logit_scale
    if architecture in ("gemma2", "gemma3", "cohere2"):
        found["attention.sliding_window"] = config.sliding_window
    if architecture == "granite":
        found |= {"embedding_scale": config.embedding_multiplier, "residual_scale": config.residual_multiplier}
        found |= {"attention.scale": config.attention_multiplier, "logit_scale": config.logits_scaling}
    return {f"{architecture}.{key}": value for key, value in found.items()}


def describe_tokenizer(folder: Path, pre: str, num_rows: int) -> dict[str, Any]:
    """Return what llama.cpp's converter writes of a folder's tokenizer, for an embedding of so many rows."""
    import gguf

    data = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    added = {token["id"]: token for token in data["added_tokens"]}
    tokens = {i: token for token, i in data["model"]["vocab"].items()} | {i: one["content"] for i, one in added.items()}
    kinds = dict.fromkeys(tokens, gguf.TokenType.NORMAL)
    kinds |= {i: gguf.TokenType.CONTROL if one["special"] else gguf.TokenType.USER_DEFINED for i, one in added.items()}
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [tokens.get(i, f"[PAD{i}]") for i in range(num_rows)],
        "tokenizer.ggml.token_type": [int(kinds.get(i, gguf.TokenType.UNUSED)) for i in range(num_rows)],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in data["model"]["merges"]],
        "tokenizer.chat_template": (folder / "chat_template.jinja").read_text(),
    }
    by_text = {token: i for i, token in tokens.items()}
    for name, key in (("eos", "eos"), ("pad", "padding")):
        metadata[f"tokenizer.ggml.{key}_token_id"] = by_text[settings[f"{name}_token"]]
    return metadata


def damage(data: bytes, rng: random.Random) -> bytes:
    """Return a file with one to three faults: a cut, other bytes, a number that lies, a piece moved or doubled."""
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data) or 1)
        kind = rng.randrange(5)
        if kind == 0:
            data = data[:at]
        elif kind == 1:
            data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        elif kind == 2:
            number = rng.choice((0, 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1))
            data = data[:at] + struct.pack("<Q", number) + data[at + 8 :]
        elif kind == 3:
            data = data[:at] + rng.randbytes(rng.randint(1, 16)) + data[at:]
        else:
            end = at + rng.randint(1, 64)
            data = data[:end] + data[at:]
    return data


def find_kind(value: Any) -> Any:
    """Return the type of a value in metadata. llama.cpp has single whole numbers without a sign."""
    import gguf

    return gguf.GGUFValueType.UINT32 if type(value) is int else gguf.GGUFValueType.get_type(value)


def save_gguf(path: Path, architecture: str = "qwen3", types: Types | str = "F32", **options: Any) -> Any:
    """Write a random model to a file, and return transformers' model of what the file means, in float32.

    Args:
        types: the type of every matrix, or of each.
        options: those of `write_gguf`, and changes of transformers' configuration.
    """
    own = {name: options.pop(name) for name in ("metadata", "tensors", "num_files") if name in options}
    class_name, config = MODELS[architecture]
    model_class = getattr(transformers, class_name)
    scratch = path.parent / f"{path.stem}-transformers"
    model = save_random(scratch, model_class=model_class, **{**LARGER, **config, **options})
    write_gguf(path, model, NAMED_LIKE.get(architecture, architecture), types, **own)
    return model


def write_gguf(
    path: Path,
    model: Any,
    architecture: str,
    types: Types | str,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    num_files: int = 1,
) -> None:
    """Write transformers' model to a file, and give it the numbers that the file means.

    Args:
        metadata: keys beside those of the model; None takes a key away.
        tensors: tensors beside those of the model.
        num_files: how many files it is split into.
    """
    import gguf

    config = model.config
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    rng = np.random.default_rng(0)
    limit = {"split_max_tensors": -(-len(model.state_dict()) // num_files)} if num_files > 1 else {}
    writer = gguf.GGUFWriter(path, architecture, **limit)
    for key, value in (describe(architecture, config) | dict(metadata or {})).items():
        if value is not None:
            item = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
            writer.add_key_value(key, value, find_kind(value), item)

    def add(name: str, parameter: torch.Tensor, heads: int = 0, plus: float = 0.0) -> None:
        """Write a tensor, and give the model the numbers that the file has."""
        values = parameter.detach().numpy().copy()
        type_name = "F32" if values.ndim == 1 else types if isinstance(types, str) else types(name)
        if heads:
            values = pair_rows(values, heads) if values.ndim > 1 else pair_rows(values[:, None], heads)[:, 0]
        tensor_type = gguf.GGMLQuantizationType[type_name]
        if type_name in ("F32", "F16", "BF16"):
            raw = gguf.quantize(values + plus if plus else values, tensor_type)
        else:
            raw = draw_matrix(type_name, values, rng)
        writer.add_tensor(name, raw, raw_dtype=tensor_type)
        means = gguf.dequantize(raw, tensor_type).reshape(values.shape) - plus
        if heads:
            means = part_rows(means, heads) if means.ndim > 1 else part_rows(means[:, None], heads)[:, 0]
        parameter.data.copy_(torch.from_numpy(np.ascontiguousarray(means)))

    for name, parameter in model.named_parameters():
        if name.endswith("experts.gate_up_proj"):
            block = name.split(".")[2]
            gate, up = parameter.data.chunk(2, 1)
            add(f"blk.{block}.ffn_gate_exps.weight", gate)
            add(f"blk.{block}.ffn_up_exps.weight", up)
        elif name.endswith("experts.down_proj"):
            add(f"blk.{name.split('.')[2]}.ffn_down_exps.weight", parameter.data)
        else:
            own_name = names.get_name(name, (".weight", ".bias"))
            projections = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
            heads = projections.get(name.split(".")[-2], 0) if architecture in PAIRED else 0
            is_folded = architecture.startswith(("gemma", "nemotron")) and name.endswith("norm.weight")
            add(own_name, parameter.data, heads, float(is_folded))
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
