"""The shapes of the published Qwen3 models, by name: with load_format="dummy" they need no download.

Source: the config.json of Qwen/Qwen3-0.6B ... Qwen/Qwen3-32B.
"""

from typing import Any

_SHAPES = {
    # name: (hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads, intermediate_size, tied)
    "qwen3-0.6b": (1024, 28, 16, 8, 3072, True),
    "qwen3-1.7b": (2048, 28, 16, 8, 6144, True),
    "qwen3-4b": (2560, 36, 32, 8, 9728, True),
    "qwen3-8b": (4096, 36, 32, 8, 12288, False),
    "qwen3-14b": (5120, 40, 40, 8, 17408, False),
    "qwen3-32b": (5120, 64, 64, 8, 25600, False),
}

PRESETS = tuple(_SHAPES)


def preset_config(name: str) -> dict[str, Any]:
    """The config.json of the preset, as a dict."""
    hidden, layers, heads, kv_heads, intermediate, tied = _SHAPES[name]
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "head_dim": 128,
        "tie_word_embeddings": tied,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "attention_bias": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "eos_token_id": 151645,
    }
