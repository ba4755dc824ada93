"""No key of config.json that changes the numbers is passed over in silence."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from helpers.paths import ROOT
from helpers.tiny import SMALL, edit_json, save_random
from transformers import GraniteForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.load import read_default_params
from nanovllm.models import config_keys, generation_keys
from nanovllm.models.config_keys import ASIDES, HARMLESS, READ, TRANSLATED, _log_once
from nanovllm.models.model_config import FAMILIES, Family, load_model_config
from nanovllm.models.model_folder import ModelFolder
from nanovllm.models.sizes import Sizes

# ---- configurations as their authors published them

QWEN = {
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3 = QWEN | {
    "attention_bias": False,
    "eos_token_id": 151645,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_scaling": None,
    "sliding_window": None,
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "model_type": "llama",
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "use_cache": True,
}
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
PUBLISHED: dict[str, tuple[dict[str, Any], float]] = {  # and how many billion parameters they describe
    "Qwen3-0.6B": (
        QWEN3
        | {
            "architectures": ["Qwen3ForCausalLM"],
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "max_window_layers": 28,
            "model_type": "qwen3",
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
        },
        0.6,
    ),
    "Qwen3-30B-A3B": (
        QWEN3
        | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "decoder_sparse_step": 1,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "max_window_layers": 48,
            "mlp_only_layers": [],
            "model_type": "qwen3_moe",
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
            "tie_word_embeddings": False,
        },
        30.5,
    ),
    "Qwen2-7B-Instruct": (
        QWEN
        | {
            "architectures": ["Qwen2ForCausalLM"],
            "eos_token_id": 151645,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "max_position_embeddings": 32768,
            "max_window_layers": 28,
            "model_type": "qwen2",
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "sliding_window": 131072,
            "tie_word_embeddings": False,
            "vocab_size": 152064,
        },
        7.6,
    ),
    "Qwen2.5-0.5B": (
        QWEN
        | {
            "architectures": ["Qwen2ForCausalLM"],
            "eos_token_id": 151643,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "max_position_embeddings": 32768,
            "max_window_layers": 24,
            "model_type": "qwen2",
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "sliding_window": 32768,
            "tie_word_embeddings": True,
            "use_mrope": False,
        },
        0.5,
    ),
    "Llama-2-7b-chat-hf": (
        LLAMA
        | {
            "_name_or_path": "meta-llama/Llama-2-7b-chat-hf",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "max_position_embeddings": 4096,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "rope_scaling": None,
            "tie_word_embeddings": False,
            "torch_dtype": "float16",
            "transformers_version": "4.32.0.dev0",
            "vocab_size": 32000,
        },
        6.7,
    ),
    "Meta-Llama-3-8B-Instruct": (
        LLAMA
        | {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 128000,
            "eos_token_id": 128009,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 8192,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rope_scaling": None,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.40.0.dev0",
            "vocab_size": 128256,
        },
        8.0,
    ),
    "Llama-3.2-1B-Instruct": (
        LLAMA
        | {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 128000,
            "eos_token_id": [128001, 128008, 128009],
            "head_dim": 64,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "num_attention_heads": 32,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "rope_scaling": {
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.45.0.dev0",
            "vocab_size": 128256,
        },
        1.2,
    ),
    "Qwen3.5-0.8B, of which the text is read": (
        {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "image_token_id": 248056,
            "model_type": "qwen3_5",
            "text_config": {
                "attention_bias": False,
                "attention_dropout": 0.0,
                "attn_output_gate": True,
                "bos_token_id": None,
                "dtype": "bfloat16",
                "eos_token_id": 248044,
                "full_attention_interval": 4,
                "head_dim": 256,
                "hidden_act": "silu",
                "hidden_size": 1024,
                "initializer_range": 0.02,
                "intermediate_size": 3584,
                "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 6,
                "linear_conv_kernel_dim": 4,
                "linear_key_head_dim": 128,
                "linear_num_key_heads": 16,
                "linear_num_value_heads": 16,
                "linear_value_head_dim": 128,
                "mamba_ssm_dtype": "float32",
                "max_position_embeddings": 262144,
                "mlp_only_layers": [],
                "model_type": "qwen3_5_text",
                "mtp_num_hidden_layers": 1,
                "mtp_use_dedicated_embeddings": False,
                "num_attention_heads": 8,
                "num_hidden_layers": 24,
                "num_key_value_heads": 2,
                "pad_token_id": None,
                "partial_rotary_factor": 0.25,
                "rms_norm_eps": 1e-06,
                "rope_parameters": {
                    "mrope_interleaved": True,
                    "mrope_section": [11, 11, 10],
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 10000000,
                    "rope_type": "default",
                },
                "use_cache": True,
                "vocab_size": 248320,
            },
            "tie_word_embeddings": True,
            "video_token_id": 248057,
            "vision_config": {"depth": 12, "hidden_size": 768, "model_type": "qwen3_5_vision"},
        },
        0.752,
    ),
    "Qwen3.5-35B-A3B, of which the text is read": (
        {
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "image_token_id": 248056,
            "model_type": "qwen3_5_moe",
            "text_config": {
                "attention_bias": False,
                "attention_dropout": 0.0,
                "attn_output_gate": True,
                "dtype": "bfloat16",
                "eos_token_id": 248044,
                "full_attention_interval": 4,
                "head_dim": 256,
                "hidden_act": "silu",
                "hidden_size": 2048,
                "initializer_range": 0.02,
                "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 10,
                "linear_conv_kernel_dim": 4,
                "linear_key_head_dim": 128,
                "linear_num_key_heads": 16,
                "linear_num_value_heads": 32,
                "linear_value_head_dim": 128,
                "mamba_ssm_dtype": "float32",
                "max_position_embeddings": 262144,
                "mlp_only_layers": [],
                "model_type": "qwen3_5_moe_text",
                "moe_intermediate_size": 512,
                "mtp_num_hidden_layers": 1,
                "mtp_use_dedicated_embeddings": False,
                "num_attention_heads": 16,
                "num_experts": 256,
                "num_experts_per_tok": 8,
                "num_hidden_layers": 40,
                "num_key_value_heads": 2,
                "output_router_logits": False,
                "partial_rotary_factor": 0.25,
                "rms_norm_eps": 1e-06,
                "rope_parameters": {
                    "mrope_interleaved": True,
                    "mrope_section": [11, 11, 10],
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 10000000,
                    "rope_type": "default",
                },
                "router_aux_loss_coef": 0.001,
                "shared_expert_intermediate_size": 512,
                "use_cache": True,
                "vocab_size": 248320,
            },
            "tie_word_embeddings": False,
            "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": "qwen3_5_moe"},
        },
        34.66,
    ),
    "Mistral-7B-Instruct-v0.1": (
        MISTRAL
        | {
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "transformers_version": "4.34.0.dev0",
            "vocab_size": 32000,
        },
        7.2,
    ),
    "Mistral-7B-Instruct-v0.3": (
        MISTRAL
        | {
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "transformers_version": "4.42.0.dev0",
            "vocab_size": 32768,
        },
        7.2,
    ),
}
GRANITE = {
    "architectures": ["GraniteForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.1,
    "attention_multiplier": 0.015625,
    "bos_token_id": 0,
    "embedding_multiplier": 12.0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "logits_scaling": 8.0,
    "max_position_embeddings": 4096,
    "mlp_bias": False,
    "model_type": "granite",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.46.0.dev0",
    "use_cache": True,
    "vocab_size": 49155,
}
"""granite-3.0-2b-instruct's."""
MULTIPLIERS = ["attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"]


@pytest.fixture(autouse=True)
def forget_what_was_logged() -> None:
    _log_once.cache_clear()


@pytest.fixture
def granite_as_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Granite is a family like Llama, and nobody reads its multipliers, also once the engine has Granite."""
    monkeypatch.setitem(FAMILIES, "GraniteForCausalLM", Family("GraniteConfig"))
    monkeypatch.setattr(config_keys, "KNOWN", config_keys.KNOWN.difference(MULTIPLIERS))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_understood_without_a_warning(name: str, caplog: pytest.LogCaptureFixture) -> None:
    data, billions = PUBLISHED[name]
    sizes = Sizes(load_model_config(data, name))
    assert sizes.num_parameters / 1e9 == pytest.approx(billions, rel=0.05)
    assert not caplog.records


@pytest.mark.usefixtures("granite_as_a_row")
def test_granite_as_a_mere_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        load_model_config(GRANITE, "granite/config.json", "nanovllm")
    message = str(caught.value)
    assert message.startswith("granite/config.json: this engine does not read attention_multiplier (0.015625;")
    assert [name for name in GRANITE if name in message] == MULTIPLIERS
    save_random(tmp_path, model_class=GraniteForCausalLM, head_dim=..., residual_multiplier=0.5)
    with pytest.raises(ValueError, match=r"does not read residual_multiplier \(0\.5; the default is 1\.0\)\. It would"):
        LLM(tmp_path, dtype="float32", max_model_len=64, model_impl="nanovllm")


@pytest.mark.usefixtures("granite_as_a_row")
@pytest.mark.parametrize("name", MULTIPLIERS)
def test_one_key_that_nobody_reads_is_enough(name: str) -> None:
    neutral = GRANITE | dict.fromkeys(MULTIPLIERS, 1.0)
    load_model_config(neutral, "config.json")
    with pytest.raises(ValueError, match=f"does not read {name} "):
        load_model_config(neutral | {name: 0.5}, "config.json", "nanovllm")


NEUTRAL = {"chunk_size_feed_forward": 0, "is_encoder_decoder": False}
"""Keys that nobody reads whose defaults ask for nothing. Other values are refused."""


def find_unread_keys(config_class: str) -> set[str]:
    return set(getattr(transformers, config_class)().to_dict()) - config_keys.KNOWN - NEUTRAL.keys()


@pytest.mark.parametrize("config_class", sorted({family.config_class for family in FAMILIES.values()}))
def test_every_key_of_a_family_is_read_or_harmless(config_class: str) -> None:
    """Fails for a new family whose mathematics has a key of its own, also if published models leave it out."""
    unread = find_unread_keys(config_class)
    assert not unread, f"read {unread} and add them to READ in models/config_keys.py, or say there why they do no harm"
    defaults = getattr(transformers, config_class)().to_dict()
    assert all(defaults[name] == value for name, value in NEUTRAL.items() if name in defaults)


def test_a_neutral_key_that_one_family_alone_has_breaks_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe "Add a dense family" adds such keys."""
    monkeypatch.setitem(NEUTRAL, "attention_out_bias", False)
    for config_class in sorted({family.config_class for family in FAMILIES.values()}):
        test_every_key_of_a_family_is_read_or_harmless(config_class)


@pytest.mark.usefixtures("granite_as_a_row")
def test_a_row_for_granite_would_fail_the_test_above() -> None:
    assert sorted(find_unread_keys("GraniteConfig")) == MULTIPLIERS


def test_the_lists_are_disjoint_and_what_is_said_to_be_read_is_read() -> None:
    assert len(READ) + len(TRANSLATED) + len(HARMLESS) + len(ASIDES) == len(config_keys.KNOWN)
    files = [path for path in (ROOT / "nanovllm").rglob("*.py") if path.name not in ("config_keys.py", "hub.py")]
    source = "\n".join(path.read_text() for path in files)
    named = set(re.findall(r"\w+", source))
    assert not READ - named


def test_keys_that_nobody_knows_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    data = PUBLISHED["Qwen2.5-0.5B"][0] | {"unsloth_fixed": True, "logit_scale": 0.0625}
    with caplog.at_level(logging.INFO, "nanovllm"):
        for _ in range(3):
            load_model_config(data, "config.json")
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.message == (
        "config.json: keys without effect, which transformers' Qwen2Config does not know: "
        "'logit_scale, unsloth_fixed, use_mrope'"
    )


def test_a_saved_configuration_with_all_its_keys_is_accepted() -> None:
    """Ranks get the configuration in this form."""
    for data, _ in PUBLISHED.values():
        config = load_model_config(data, "config.json")
        load_model_config(json.loads(config.to_json_string(use_diff=False)), "rank 0")


def test_attention_to_later_tokens_is_refused(tmp_path: Path) -> None:
    """transformers reads `is_causal`, though no configuration names it: models for vectors have it."""
    save_random(tmp_path)
    edit_json(tmp_path / "config.json", is_causal=False)
    with pytest.raises(ValueError, match="is_causal is false; attention to later tokens is not supported"):
        LLM(tmp_path, **SMALL)
    edit_json(tmp_path / "config.json", is_causal=True)
    with LLM(tmp_path, **SMALL) as llm:
        assert llm.embed([[1, 2]], use_tqdm=False)


# ---- generation_config.json


def test_every_key_of_generation_config_is_read_harmless_or_refused() -> None:
    """A version of transformers with another key makes this fail: decide then what the key asks for."""
    known = generation_keys.READ | generation_keys.HARMLESS | generation_keys.NEUTRAL.keys()
    assert transformers.GenerationConfig().to_dict().keys() <= known
    assert len(known) == sum(map(len, (generation_keys.READ, generation_keys.HARMLESS, generation_keys.NEUTRAL)))


ASKED = {
    **{"no_repeat_ngram_size": 3, "num_beams": 4, "typical_p": 0.9, "begin_suppress_tokens": [5], "min_length": 9},
    **{"guidance_scale": 1.5, "stop_strings": ["x"], "sequence_bias": [[[5], 2.0]], "token_healing": True},
    **{"penalty_alpha": 0.6, "epsilon_cutoff": 3e-4, "encoder_repetition_penalty": 1.2, "forced_eos_token_id": 2},
}


def test_defaults_that_cannot_be_had_are_refused_by_name_where_a_request_wants_them(tmp_path: Path) -> None:
    save_random(tmp_path)
    path = tmp_path / "generation_config.json"
    greedy = SamplingParams(0, 2)
    for name, value in ASKED.items():
        path.write_text(json.dumps({name: value}))
        with LLM(tmp_path, **SMALL) as llm:
            message = rf"generation_config\.json: this engine does not have {name} \(.*\): give SamplingParams"
            for use in (lambda: llm.generate([[1]]), llm.get_default_sampling_params, lambda: llm.prepare([1])):
                with pytest.raises(ValueError, match=message):
                    use()
            assert llm.generate([[1]], greedy, use_tqdm=False) and llm.embed([[1]], use_tqdm=False)
    neutral = {name: value for name, value in generation_keys.NEUTRAL.items() if name != "top_h"}
    path.write_text(json.dumps({**neutral, "max_length": 4096, "strange": 5}))
    with LLM(tmp_path, **SMALL) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
    path.write_text(json.dumps({"do_sample": False, "typical_p": 0.9}))
    with LLM(tmp_path, **SMALL) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(0)


@pytest.mark.parametrize(
    "odd",
    [
        *({"top_p": 0.0}, {"top_k": 20.0}, {"repetition_penalty": 0.0}, {"max_new_tokens": -1}, {"min_new_tokens": 65}),
        *({"bad_words_ids": [5]}, {"bad_words_ids": ["a"]}, {"suppress_tokens": ["a"]}, {"suppress_tokens": 5}),
    ],
    ids=str,
)
def test_odd_values_do_not_keep_a_model_from_loading(odd: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(odd))
    _, refused = read_default_params(ModelFolder(tmp_path))
    assert "generation_config.json: " in refused and refused.endswith("take this file's values")
