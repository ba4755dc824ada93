"""Makes of a GGUF file's metadata what config.json says of a model: keys by a table of ours, for each architecture.

Each key of the architecture is read, or has the one value that changes nothing, or is refused by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nanovllm.features.gguf.reader import GgufFile, Place
from nanovllm.features.gguf.vocabulary import read_end_ids
from nanovllm.utils.checks import as_integer, as_number, quote

LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""{a tensor of a layer: transformers' name of it}, as most architectures have them."""
ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""The same of the tensors that are in no layer."""
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
}
"""A star stands for the number of an expert: the file has the matrices of all experts in one tensor."""
SHARED = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.*.w1",
    "ffn_up_exps": "block_sparse_moe.experts.*.w3",
    "ffn_down_exps": "block_sparse_moe.experts.*.w2",
}
NORMS_BEHIND = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GEMMA = NORMS_BEHIND | {"ffn_norm": "pre_feedforward_layernorm"}

DIVISORS = "rope_freqs.weight"
"""The tensor of numbers by which the angles of each pair of elements are divided: Llama 3's scaling."""
LONG_FACTORS = "rope_factors_long.weight"
SHORT_FACTORS = "rope_factors_short.weight"

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "vocab_size": (),
    "tensor_data_layout": (),
    "rope.scaling.finetuned": (),
    "pooling_type": (),
    "rope.scaling.original_context_length": (),
    "rope.scaling.factor": (0.0, 1.0),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
    "logit_scale": (1.0,),
    "residual_scale": (1.0,),
    "embedding_scale": (1.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "router_logit_softcapping": (0.0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_shared_count": (0,),
    "expert_gating_func": (0, 1),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "leading_dense_block_count": (0,),
}
"""{a key of an architecture that nobody reads: the values that change nothing}; () if none of its values does."""

SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
"""{a key: what generation_config.json calls it}."""
OF_SAMPLING = "general.sampling."
"""Keys of sampling begin so. Those that `SAMPLING` has not keep llama.cpp's name, which generation_keys.py knows."""


class Keys:
    """The keys of a file's architecture. Whoever takes one has read it."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture
        self._left = {
            key.removeprefix(f"{architecture}."): value
            for key, value in file.metadata.items()
            if key.startswith(f"{architecture}.")
        }

    def name(self, key: str) -> str:
        """Return a key as messages call it."""
        return f"{self.file.path}: {self.architecture}.{key}"

    def take(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or the default. A list of equal values, one for each layer, is one value."""
        value = self._left.pop(key, default)
        if isinstance(value, list):
            if len(set(map(repr, value))) != 1:
                raise ValueError(f"{self.name(key)} differs between layers, which is not supported: {quote(value)}")
            value = value[0]
        if value is None:
            raise ValueError(f"{self.name(key)} is missing")
        return value

    def take_integer(self, key: str, default: int | None = None) -> int:
        """Return a whole number that is at least 0."""
        return as_integer(self.take(key, default), self.name(key), 0)

    def take_number(self, key: str, default: float | None = None) -> float:
        """Return a number."""
        return as_number(self.take(key, default), self.name(key))

    def refuse_rest(self) -> None:
        """Raise a ValueError for a key that was not read, and may change what the model says."""
        for key, value in self._left.items():
            accepted = NEUTRAL.get(key)
            if accepted is None or (accepted and value not in accepted):
                raise ValueError(
                    f"{self.name(key)} is {quote(value)}, which is not read here; the model would say something else"
                )


@dataclass(frozen=True)
class Architecture:
    """Says what models are called, and how their keys and tensors become transformers'.

    Attributes:
        causal: transformers' class.
        model_type: the type of model in config.json; "" if it is the architecture's name.
        layer: {a tensor of a layer: transformers' name of it}.
        has_pairs: whether the rows of queries and keys are in pairs, as llama.cpp's llama has them.
        has_folded_norms: whether 1 was added to the weights of norms.
        epsilon: what transformers calls the number that norms add. Its key is another one where it is not that of RMS.
        ends: see `ENDS`.
        sparse: what describes the files of this architecture that have experts.
        rotates_parts: whether only a part of a head may rotate.
        read: adds what only this architecture has to the content of a config.json.
    """

    causal: str
    model_type: str = ""
    layer: Mapping[str, str] = field(default_factory=lambda: LAYER)
    has_pairs: bool = False
    has_folded_norms: bool = False
    rotates_parts: bool = False
    epsilon: str = "rms_norm_eps"
    ends: Mapping[str, str] = field(default_factory=lambda: ENDS)
    sparse: "Architecture | None" = None
    read: Callable[[Keys, dict[str, Any]], None] = lambda keys, config: None


def read_experts(keys: Keys, config: dict[str, Any]) -> None:
    config["num_experts"] = keys.take_integer("expert_count")
    config["num_experts_per_tok"] = keys.take_integer("expert_used_count")
    config["moe_intermediate_size"] = keys.take_integer("expert_feed_forward_length", config["intermediate_size"])
    config["norm_topk_prob"] = True  # llama.cpp has it so for all of them
    config |= {"decoder_sparse_step": 1, "mlp_only_layers": []}


def read_plain_experts(keys: Keys, config: dict[str, Any]) -> None:
    """Read what experts have whose weights for a token do not add up to 1. No key says so."""
    read_experts(keys, config)
    config["norm_topk_prob"] = keys.take("expert_weights_norm", False)


def read_shared_expert(keys: Keys, config: dict[str, Any]) -> None:
    read_plain_experts(keys, config)
    shared = keys.take_integer("expert_shared_feed_forward_length", config["intermediate_size"])
    config["shared_expert_intermediate_size"] = shared


def read_mixtral(keys: Keys, config: dict[str, Any]) -> None:
    config["num_experts"] = config["num_local_experts"] = keys.take_integer("expert_count")
    config["num_experts_per_tok"] = keys.take_integer("expert_used_count")


def read_llama(keys: Keys, config: dict[str, Any]) -> None:
    config["attention_bias"] = "blk.0.attn_q.bias" in keys.file.tensors
    divisors = keys.file.tensors.get(DIVISORS)
    if divisors is None:
        return
    if config["rope_parameters"]["rope_type"] != "default":
        raise ValueError(f"{keys.name('rope.scaling.type')} is set, and the file has rope_freqs, too")
    values = read_floats(divisors, config["head_dim"] // 2)
    if min(values) <= 0:
        raise ValueError(f"{keys.file.path}: rope_freqs has {min(values)}; the numbers must be above 0")
    config["rope_parameters"]["divisors"] = values


def find_gemma_scale(keys: Keys, config: dict[str, Any], layers_of_27b: int) -> int:
    """Return query_pre_attn_scalar: the head's size, but for the models of 27 billion parameters. No key says it."""
    if config["num_hidden_layers"] == layers_of_27b:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def read_gemma2(keys: Keys, config: dict[str, Any]) -> None:
    config["sliding_window"] = keys.take_integer("attention.sliding_window")
    config["attn_logit_softcapping"] = keys.take_number("attn_logit_softcapping")
    config["final_logit_softcapping"] = keys.take_number("final_logit_softcapping")
    config["query_pre_attn_scalar"] = find_gemma_scale(keys, config, 46)


def read_gemma3(keys: Keys, config: dict[str, Any]) -> None:
    period = keys.take_integer("attention.sliding_window_pattern", 6)
    kinds = ("sliding_attention", "full_attention")
    config["sliding_window"] = keys.take_integer("attention.sliding_window")
    config["layer_types"] = [kinds[(i + 1) % period == 0] for i in range(min(config["num_hidden_layers"], 1 << 11))]
    config["final_logit_softcapping"] = keys.take_number("final_logit_softcapping", 0.0) or None
    config["query_pre_attn_scalar"] = find_gemma_scale(keys, config, 62)
    local = keys.take_number("rope.freq_base_swa", 10000.0)
    sliding = {"rope_type": "default", "rope_theta": local}
    config["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": sliding}


def read_granite(keys: Keys, config: dict[str, Any]) -> None:
    config["embedding_multiplier"] = keys.take_number("embedding_scale")
    config["residual_multiplier"] = keys.take_number("residual_scale")
    config["attention_multiplier"] = keys.take_number("attention.scale")
    config["logits_scaling"] = keys.take_number("logit_scale")


def read_stablelm(keys: Keys, config: dict[str, Any]) -> None:
    keys.take("use_parallel_residual", True)  # llama.cpp asks the tensors
    config["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in keys.file.tensors
    config["use_qkv_bias"] = "blk.0.attn_q.bias" in keys.file.tensors


def read_starcoder2(keys: Keys, config: dict[str, Any]) -> None:
    config["use_bias"] = "blk.0.attn_q.bias" in keys.file.tensors
    config["sliding_window"] = None


def read_cohere(keys: Keys, config: dict[str, Any]) -> None:
    config["logit_scale"] = keys.take_number("logit_scale")
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in keys.file.tensors


def read_cohere2(keys: Keys, config: dict[str, Any]) -> None:
    config["logit_scale"] = keys.take_number("logit_scale")
    config["sliding_window"] = keys.take_integer("attention.sliding_window")
    config["sliding_window_pattern"] = keys.take_integer("attention.sliding_window_pattern", 4)


def read_biases(keys: Keys, config: dict[str, Any]) -> None:
    config["attention_bias"] = "blk.0.attn_q.bias" in keys.file.tensors
    config["attention_out_bias"] = "blk.0.attn_output.bias" in keys.file.tensors


def read_phi3(keys: Keys, config: dict[str, Any]) -> None:
    config["sliding_window"] = keys.take_integer("attention.sliding_window", 0) or None
    tensors = keys.file.tensors
    original = keys.take_integer("rope.scaling.original_context_length", config["max_position_embeddings"])
    long = tensors.get(LONG_FACTORS)
    short = tensors.get(SHORT_FACTORS)
    if long is None or short is None:
        return
    rope = config["rope_parameters"]
    size = int(config["head_dim"] * rope["partial_rotary_factor"]) // 2
    rope |= {"rope_type": "longrope", "original_max_position_embeddings": original}
    rope |= {"long_factor": read_floats(long, size), "short_factor": read_floats(short, size)}
    if (factor := keys.take_number("rope.scaling.attn_factor", 0.0)) != 0:
        rope["attention_factor"] = factor
    config["original_max_position_embeddings"] = original


ARCHITECTURES = {
    "llama": Architecture(
        "LlamaForCausalLM",
        has_pairs=True,
        sparse=Architecture("MixtralForCausalLM", "mixtral", LAYER | MIXTRAL, has_pairs=True, read=read_mixtral),
        read=read_llama,
    ),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", "qwen2_moe", LAYER | EXPERTS | SHARED, read=read_shared_expert),
    "qwen3": Architecture("Qwen3ForCausalLM", layer=LAYER | HEAD_NORMS),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe", layer=LAYER | HEAD_NORMS | EXPERTS, read=read_experts),
    "gemma": Architecture("GemmaForCausalLM", has_folded_norms=True),
    "gemma2": Architecture("Gemma2ForCausalLM", layer=LAYER | GEMMA, has_folded_norms=True, read=read_gemma2),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        layer=LAYER | GEMMA | HEAD_NORMS,
        has_folded_norms=True,
        read=read_gemma3,
    ),
    "granite": Architecture("GraniteForCausalLM", has_pairs=True, read=read_granite),
    "olmo2": Architecture("Olmo2ForCausalLM", layer=LAYER | HEAD_NORMS | NORMS_BEHIND),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        layer=LAYER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        rotates_parts=True,
        read=read_phi3,
    ),
    "phi2": Architecture(
        "PhiForCausalLM",
        "phi",
        LAYER | {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        rotates_parts=True,
        epsilon="layer_norm_eps",
        ends=ENDS | {"output_norm": "model.final_layernorm"},
    ),
    "stablelm": Architecture("StableLmForCausalLM", rotates_parts=True, epsilon="layer_norm_eps", read=read_stablelm),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM",
        layer=LAYER | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        epsilon="norm_epsilon",
        read=read_starcoder2,
    ),
    "command-r": Architecture(
        "CohereForCausalLM", "cohere", LAYER | HEAD_NORMS, epsilon="layer_norm_eps", read=read_cohere
    ),
    "cohere2": Architecture("Cohere2ForCausalLM", epsilon="layer_norm_eps", read=read_cohere2),
    "nemotron": Architecture("NemotronForCausalLM", has_folded_norms=True, rotates_parts=True, epsilon="norm_eps"),
    "smollm3": Architecture("SmolLM3ForCausalLM", has_pairs=True),
    "arcee": Architecture("ArceeForCausalLM", has_pairs=True),
    "olmoe": Architecture("OlmoeForCausalLM", layer=LAYER | HEAD_NORMS | EXPERTS, read=read_plain_experts),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM"),
    "seed_oss": Architecture(
        "SeedOssForCausalLM",
        layer=LAYER | {"post_attention_norm": "post_attention_layernorm"},
        read=read_biases,
    ),
    "hunyuan-dense": Architecture(
        "HunYuanDenseV1ForCausalLM",
        "hunyuan_v1_dense",
        LAYER | {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
    ),
    "glm4": Architecture(
        "Glm4ForCausalLM",
        layer=LAYER
        | {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}
        | {"ffn_up": "mlp.gate_up_proj"},
        rotates_parts=True,
        read=read_biases,
    ),
}
"""By the name that general.architecture has."""


def find_architecture(file: GgufFile) -> tuple[str, Architecture]:
    """Return the architecture of a file, and its name.

    Raises:
        ValueError: the file holds no model, or one that is not known here.
    """
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise ValueError(f"{file.path} holds no language model: general.type is {quote(kind)}")
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(
            f"{file.path}: the GGUF file's architecture is {quote(name)}; supported are {', '.join(ARCHITECTURES)}: "
            "the model that the file was made of may run"
        )
    found = ARCHITECTURES[name]
    if found.sparse is not None and file.metadata.get(f"{name}.expert_count"):
        found = found.sparse
    return name, found


def read_config(file: GgufFile) -> dict[str, Any]:
    """Return what a config.json would say of the model in a file.

    Raises:
        ValueError: a key is missing, or not supported.
    """
    name, architecture = find_architecture(file)
    keys = Keys(file, name)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ValueError(f"{file.path} has no matrix token_embd.weight, the embedding")
    size = keys.take_integer("embedding_length")
    heads = keys.take_integer("attention.head_count")
    head_dim = keys.take_integer("attention.key_length", size // max(heads, 1))
    if keys.take_integer("attention.value_length", head_dim) != head_dim:
        raise ValueError(f"{keys.name('attention.value_length')} is not that of keys, {head_dim}: not supported")
    is_rms = architecture.epsilon == "rms_norm_eps"
    config: dict[str, Any] = {
        "architectures": [architecture.causal],
        "model_type": architecture.model_type or name,
        "dtype": find_dtype(file),
        "vocab_size": embedding.shape[0],
        "hidden_size": size,
        "intermediate_size": keys.take_integer("feed_forward_length"),
        "num_hidden_layers": keys.take_integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.take_integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        architecture.epsilon: keys.take_number(f"attention.layer_norm_{'rms_' * is_rms}epsilon"),
        "max_position_embeddings": keys.take_integer("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_id": find_end_tokens(file),
        "pad_token_id": None,  # some of transformers' classes have a default beyond a small vocabulary
    }
    config["rope_parameters"] = read_rope(keys, architecture, head_dim)
    architecture.read(keys, config)
    keys.refuse_rest()
    return config


def find_end_tokens(file: GgufFile) -> list[int]:
    """Return the ids of the tokens that end an answer; ValueError if a key holds no id."""
    try:
        return read_end_ids(file.metadata)
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from None


def read_rope(keys: Keys, architecture: Architecture, head_dim: int) -> dict[str, Any]:
    """Return the rope parameters."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": keys.take_number("rope.freq_base", 10000.0)}
    num_rotated = keys.take_integer("rope.dimension_count", head_dim)
    if architecture.rotates_parts:
        rope["partial_rotary_factor"] = num_rotated / max(head_dim, 1)
    elif num_rotated != head_dim:
        raise ValueError(
            f"{keys.name('rope.dimension_count')} is {num_rotated}, and a head has {head_dim} elements: heads that "
            "rotate in part are not supported"
        )
    linear = keys.take_number("rope.scale_linear", 1.0)
    kind = keys.take("rope.scaling.type", "linear" if linear != 1 else "none")
    if kind == "none" or (kind == "longrope" and LONG_FACTORS in keys.file.tensors):
        return rope
    factor = keys.take_number("rope.scaling.factor", linear)
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise ValueError(f"{keys.name('rope.scaling.type')} is {quote(kind)}; supported are none, linear and yarn")
    original = keys.take_integer("rope.scaling.original_context_length")
    rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for name in ("beta_fast", "beta_slow"):
        rope[name] = keys.take_number(f"rope.scaling.yarn_{name}", {"beta_fast": 32.0, "beta_slow": 1.0}[name])
    return rope


def read_floats(place: Place, count: int) -> list[float]:
    """Return the numbers of a small tensor of float32."""
    if place.type_name != "F32" or place.shape != (count,):
        raise ValueError(f"{place.file}: a tensor of {count} float32 numbers has {place.type_name} {list(place.shape)}")
    numbers: list[float] = np.fromfile(place.file, "<f4", count, offset=place.offset).tolist()
    return numbers


def find_dtype(file: GgufFile) -> str:
    """Return the type of what is not quantised: the file's own if all of its matrices have it, else bfloat16."""
    kinds = {place.type_name for place in file.tensors.values() if len(place.shape) > 1}
    return {"F32": "float32", "F16": "float16"}.get("".join(kinds), "bfloat16")


def read_generation(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a generation_config.json would say: the file's defaults of sampling."""
    keys = [key for key in metadata if key.startswith(OF_SAMPLING)]
    found = {SAMPLING.get(key, key.removeprefix(OF_SAMPLING)): metadata[key] for key in keys}
    if found.get("repetition_penalty", 1) == 1:
        found.pop("penalty_last_n", None)  # the tokens that the penalty looks back to
    return found | {"do_sample": True} if found else {}
