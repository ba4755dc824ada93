"""Shapes of published models, by name. With load_format="dummy" they need no download.

Sizes are those of each model's config.json; whatever changes no size is the family's. An intermediate_size of 0 is
that of a model without dense layers.
"""

from typing import Any

_COLUMNS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"),
    *("head_dim", "vocab_size", "tie_word_embeddings"),
)
_SHAPES = {
    "Qwen/Qwen3-0.6B": (1024, 28, 16, 8, 3072, 128, 151936, True),
    "Qwen/Qwen3-1.7B": (2048, 28, 16, 8, 6144, 128, 151936, True),
    "Qwen/Qwen3-4B": (2560, 36, 32, 8, 9728, 128, 151936, True),
    "Qwen/Qwen3-8B": (4096, 36, 32, 8, 12288, 128, 151936, False),
    "Qwen/Qwen3-14B": (5120, 40, 40, 8, 17408, 128, 151936, False),
    "Qwen/Qwen3-32B": (5120, 64, 64, 8, 25600, 128, 151936, False),
    "Qwen/Qwen3-30B-A3B": (2048, 48, 32, 4, 6144, 128, 151936, False),
    "Qwen/Qwen3-235B-A22B": (4096, 94, 64, 4, 12288, 128, 151936, False),
    "Qwen/Qwen3.5-0.8B": (1024, 24, 8, 2, 3584, 256, 248320, True),
    "Qwen/Qwen3.5-4B": (2560, 32, 16, 4, 9216, 256, 248320, True),
    "Qwen/Qwen3.5-35B-A3B": (2048, 40, 16, 2, 0, 256, 248320, False),
    "Qwen/Qwen3.5-122B-A10B": (3072, 48, 32, 2, 0, 256, 248320, False),
    "Qwen/Qwen3.5-397B-A17B": (4096, 60, 32, 2, 0, 256, 248320, False),
    "Qwen/Qwen2.5-0.5B": (896, 24, 14, 2, 4864, 64, 151936, True),
    "Qwen/Qwen2.5-1.5B": (1536, 28, 12, 2, 8960, 128, 151936, True),
    "Qwen/Qwen2.5-3B": (2048, 36, 16, 2, 11008, 128, 151936, True),
    "Qwen/Qwen2.5-7B": (3584, 28, 28, 4, 18944, 128, 152064, False),
    "Qwen/Qwen2.5-14B": (5120, 48, 40, 8, 13824, 128, 152064, False),
    "Qwen/Qwen2.5-32B": (5120, 64, 40, 8, 27648, 128, 152064, False),
    "Qwen/Qwen2.5-72B": (8192, 80, 64, 8, 29568, 128, 152064, False),
    "meta-llama/Llama-2-7b-hf": (4096, 32, 32, 32, 11008, 128, 32000, False),
    "meta-llama/Llama-2-13b-hf": (5120, 40, 40, 40, 13824, 128, 32000, False),
    "meta-llama/Llama-3.1-8B": (4096, 32, 32, 8, 14336, 128, 128256, False),
    "meta-llama/Llama-3.1-70B": (8192, 80, 64, 8, 28672, 128, 128256, False),
    "meta-llama/Llama-3.2-1B": (2048, 16, 32, 8, 8192, 64, 128256, True),
    "meta-llama/Llama-3.2-3B": (3072, 28, 24, 8, 8192, 128, 128256, True),
    "mistralai/Mistral-7B-v0.3": (4096, 32, 32, 8, 14336, 128, 32768, False),
}
_EXPERTS = {
    "Qwen/Qwen3-30B-A3B": (128, 8, 768),
    "Qwen/Qwen3-235B-A22B": (128, 8, 1536),
    "Qwen/Qwen3.5-35B-A3B": (256, 8, 512),
    "Qwen/Qwen3.5-122B-A10B": (256, 8, 1024),
    "Qwen/Qwen3.5-397B-A17B": (512, 10, 1024),
}
"""The experts of a layer, those of a token, and the intermediate size of one."""
_VALUE_HEADS = {
    **{"Qwen/Qwen3.5-0.8B": 16, "Qwen/Qwen3.5-4B": 32, "Qwen/Qwen3.5-35B-A3B": 32},
    **{"Qwen/Qwen3.5-122B-A10B": 64, "Qwen/Qwen3.5-397B-A17B": 64},
}
"""The value heads of a DeltaNet layer, in models of which three of four layers are such. Each has 16 key heads."""


def _llama3(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


_THETA = {"rope_type": "default", "rope_theta": 1000000.0}
_PARTIAL = {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25}
_FAMILIES: dict[str, tuple[str, str, int, float, dict[str, Any], int]] = {
    # beginning of the id: architecture, model_type, max_position_embeddings, rms_norm_eps, rope, eos_token_id
    "Qwen/Qwen3-": ("Qwen3ForCausalLM", "qwen3", 40960, 1e-6, _THETA, 151645),
    "Qwen/Qwen3.5-": ("Qwen3_5ForCausalLM", "qwen3_5_text", 262144, 1e-6, _PARTIAL, 248044),
    "Qwen/Qwen2.5-": ("Qwen2ForCausalLM", "qwen2", 32768, 1e-6, _THETA, 151645),
    "meta-llama/Llama-2-": ("LlamaForCausalLM", "llama", 4096, 1e-5, {**_THETA, "rope_theta": 10000.0}, 2),
    "meta-llama/Llama-3.1-": ("LlamaForCausalLM", "llama", 131072, 1e-5, _llama3(8.0), 128001),
    "meta-llama/Llama-3.2-": ("LlamaForCausalLM", "llama", 131072, 1e-5, _llama3(32.0), 128001),
    "mistralai/Mistral-7B-v0.3": ("MistralForCausalLM", "mistral", 32768, 1e-5, _THETA, 2),
}

PRESETS = {model.rpartition("/")[2].lower(): model for model in _SHAPES}
"""The hub id of each shape, by the shape's name: the last part of the id in small letters."""


def preset_config(name: str) -> dict[str, Any]:
    """Return the content of config.json for the shape of that name."""
    model = PRESETS[name]
    family = next(values for beginning, values in _FAMILIES.items() if model.startswith(beginning))
    architecture, model_type, max_position, eps, rope, eos = family
    more: dict[str, Any] = {}
    if model in _EXPERTS:
        architecture = architecture.replace("For", "MoeFor")
        model_type = {"qwen3": "qwen3_moe", "qwen3_5_text": "qwen3_5_moe_text"}[model_type]
        names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
        more = dict(zip(names, _EXPERTS[model], strict=True))
        if model in _VALUE_HEADS:
            more["shared_expert_intermediate_size"] = more["moe_intermediate_size"]
        else:
            more |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    if model in _VALUE_HEADS:
        more |= {"linear_num_value_heads": _VALUE_HEADS[model], "linear_num_key_heads": 16}
        more |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}
        more["full_attention_interval"] = 4
    else:
        more["sliding_window"] = None
    return (
        dict(zip(_COLUMNS, _SHAPES[model], strict=True))
        | more
        | {
            "architectures": [architecture],
            "model_type": model_type,
            "max_position_embeddings": max_position,
            "rms_norm_eps": eps,
            "rope_parameters": rope,
            "hidden_act": "silu",
            "torch_dtype": "bfloat16",
            "eos_token_id": eos,
        }
    )


def find_shape(model: str, load_format: str) -> dict[str, Any] | None:
    """Return the content of config.json for the name of a shape; None if `model` is no such name.

    Raises:
        ValueError: load_format is not "dummy", and a shape has no weights.
    """
    name = model.lower()
    if name not in PRESETS:
        return None
    if load_format != "dummy":
        raise ValueError(
            f'model {model!r} is the name of a shape, without weights: use load_format="dummy" for random ones, '
            f'or the id "{PRESETS[name]}"'
        )
    return preset_config(name)
