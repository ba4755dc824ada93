"""Metadata becomes the model's configuration: each key is read, changes nothing, or is refused by name."""

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.gguf_models import MODELS, NAMED_LIKE, damage, describe_tokenizer, save_gguf
from helpers.paths import BOX_MODEL
from helpers.tiny import SMALL, draw_prompts, logits_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanovllm import LLM, SamplingParams
from nanovllm.features.gguf.metadata import ARCHITECTURES
from nanovllm.features.gguf.model import GgufModel
from nanovllm.models.headers import fit_to_checkpoint
from nanovllm.models.model_config import load_model_config

gguf = pytest.importorskip("gguf")

OPTIONS = SMALL | {"device": "cpu", "attention_backend": "torch"}
PROMPT = draw_prompts([100])[0]
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def read(path: Path) -> Any:
    """Return the configuration that a file's metadata gives."""
    model = GgufModel(path)
    return load_model_config(model.config, model.source)


def compare(path: Path, model: Any) -> None:
    """Compare the log-probabilities of a long prompt's tokens with transformers."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with LLM(path, **OPTIONS) as llm:
        [output] = llm.generate([PROMPT], params, use_tqdm=False)
    found = [entry[token].logprob for entry, token in zip(output["prompt_logprobs"][1:], PROMPT[1:], strict=True)]
    rows = logits_of(model, PROMPT).log_softmax(-1)
    expected = rows[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-4, atol=1e-4)


UNREAD = {
    ("qwen3", "logit_scale"): 2.0,
    ("qwen3", "attention.scale"): 0.5,
    ("qwen3", "attention.sliding_window"): 128,
    ("qwen3", "attention.causal"): False,
    ("qwen2", "embedding_scale"): 12.0,
    ("llama", "residual_scale"): 0.5,
    ("gemma", "expert_count"): 8,
    ("llama", "rope.scaling.attn_factor"): 1.5,
    ("llama", "a.key.of.tomorrow"): 1,
    ("gemma2", "router_logit_softcapping"): 30.0,
    ("qwen3moe", "expert_gating_func"): 2,
    ("qwen3moe", "expert_weights_scale"): 2.5,
}


@pytest.mark.parametrize(("architecture", "key"), UNREAD)
def test_a_key_that_nobody_reads_is_refused_with_its_value(tmp_path: Path, architecture: str, key: str) -> None:
    path = tmp_path / "model.gguf"
    value = UNREAD[architecture, key]
    save_gguf(path, architecture, metadata={f"{architecture}.{key}": value})
    with pytest.raises(ValueError, match=rf"model\.gguf: {architecture}\.{key} is {value}, which is not read here"):
        LLM(path, **OPTIONS)


def test_values_that_change_nothing_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    values = {"logit_scale": 1.0, "attention.causal": True, "expert_count": 0, "rope.scaling.type": "none"}
    model = save_gguf(path, metadata={f"qwen3.{key}": value for key, value in values.items()})
    compare(path, model)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"general.architecture": "gpt2"}, "architecture is 'gpt2'; supported are llama, qwen2, "),
        ({"general.type": "mmproj"}, "holds no language model: general.type is 'mmproj'"),
        ({"qwen3.block_count": None}, r"qwen3\.block_count is missing"),
        ({"qwen3.block_count": "two"}, r"qwen3\.block_count is 'two'"),
        ({"qwen3.block_count": 2**31}, "num_hidden_layers is 2147483648; it must be at most 2048"),
        ({"qwen3.block_count": 3}, "has the tensors of 2 layers"),
        ({"qwen3.block_count": 1}, "2 layers|tensors that the model does not"),
        ({"qwen3.embedding_length": 512}, "config.json asks for|asks for"),
        ({"qwen3.attention.value_length": 32}, r"attention\.value_length is not that of keys, 64"),
        ({"qwen3.attention.head_count_kv": [4, 2]}, "differs between layers"),
        ({"qwen3.rope.dimension_count": 32}, "heads that rotate in part"),
        ({"qwen3.rope.scaling.type": "su"}, r"rope\.scaling\.type is 'su'"),
        ({"qwen3.attention.layer_norm_rms_epsilon": 0.0}, "rms_norm_eps is 0.0"),
        ({"qwen3.rope.freq_base": float("nan")}, "nan"),
    ],
)
def test_what_metadata_may_not_say_is_refused_by_name(tmp_path: Path, metadata: dict[str, Any], words: str) -> None:
    path = tmp_path / "model.gguf"
    save_gguf(path, metadata=metadata)
    with pytest.raises(ValueError, match=words):
        LLM(path, **OPTIONS)


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("blk.0.attn_sinks.weight", np.ones(4, np.float32), "'blk.0.attn_sinks.weight' is not read here"),
        ("v.patch_embd.weight", np.ones((2, 32), np.float32), "'v.patch_embd.weight' is not read here"),
        ("rope_freqs.weight", np.ones(32, np.float32), "'rope_freqs.weight' is not read here"),
        ("output.weight", np.ones((500, 256), np.int8), "'output.weight' is of type I8, which is not read here"),
    ],
)
def test_a_tensor_that_nobody_reads_is_refused(tmp_path: Path, name: str, values: np.ndarray, words: str) -> None:
    save_gguf(tmp_path / "model.gguf", tensors={name: values})
    with pytest.raises(ValueError, match=words):
        LLM(tmp_path / "model.gguf", **OPTIONS)


def test_the_divisors_of_llama_3_are_its_scaling_of_angles(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, **LLAMA3}
    model = save_gguf(tmp_path / "other.gguf", "llama", rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, torch.device("cpu"))
    plain = 10000.0 ** (-torch.arange(0, 32, 2) / 32)
    divisors = (plain / scaled).float().numpy()
    assert divisors.min() == pytest.approx(1) and divisors.max() == pytest.approx(8)
    save_gguf(path, "llama", tensors={"rope_freqs.weight": divisors})
    compare(path, model)
    save_gguf(path, "llama", tensors={"rope_freqs.weight": divisors * 0})
    with pytest.raises(ValueError, match=r"rope_freqs has 0\.0; the numbers must be above 0"):
        LLM(path, **OPTIONS)


def test_angles_are_scaled_as_the_metadata_say(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
    keys = {"type": "yarn", "factor": 4.0, "original_context_length": 32}
    path = tmp_path / "model.gguf"
    model = save_gguf(
        path, metadata={f"qwen3.rope.scaling.{key}": value for key, value in keys.items()}, rope_parameters=yarn
    )
    compare(path, model)
    linear = {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}
    keys = {"type": "linear", "factor": 3.0}
    model = save_gguf(
        path,
        "qwen2",
        metadata={f"qwen2.rope.scaling.{key}": value for key, value in keys.items()},
        rope_parameters=linear,
    )
    compare(path, model)


def test_the_factors_of_phi_3_are_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    long, short = (rng.uniform(1, 4, 16).astype(np.float32) for _ in range(2))
    rope: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 128}
    rope |= {"long_factor": long.tolist(), "short_factor": short.tolist(), "partial_rotary_factor": 1.0}
    model = save_gguf(
        tmp_path / "model.gguf",
        "phi3",
        metadata={"phi3.rope.scaling.original_context_length": 128, "phi3.rope.dimension_count": 32},
        tensors={"rope_factors_long.weight": long, "rope_factors_short.weight": short},
        rope_parameters=rope,
        original_max_position_embeddings=128,
    )
    compare(tmp_path / "model.gguf", model)


def test_without_the_package_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nanovllm.features.gguf import reader

    save_gguf(tmp_path / "model.gguf")
    reader.load_sizes.cache_clear()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match="needs the package gguf: pip install gguf"):
        LLM(tmp_path / "model.gguf", **OPTIONS)


VALUES = st.one_of(
    st.none(),
    st.integers(0, 2**32 - 1),
    st.floats(width=32),
    st.booleans(),
    st.text(max_size=8),
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=4),
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_any_values_of_the_keys_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Nothing but a ValueError may come, in little time."""
    architecture = data.draw(st.sampled_from(list(MODELS)))
    sound = find_sound(tmp_path_factory, architecture)
    model = GgufModel(sound)
    keys = [key for key in model.file.metadata if key.startswith(f"{model.file.metadata['general.architecture']}.")]
    for key in data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=3)):
        value = data.draw(VALUES)
        if value is None:
            model.file.metadata.pop(key, None)
        else:
            model.file.metadata[key] = value
    try:
        load_model_config(model.config, model.source)
    except ValueError as error:
        assert str(error)


KNOWN: dict[str, Path] = {}


def find_sound(factory: pytest.TempPathFactory, architecture: str) -> Path:
    """Return a sound file of an architecture."""
    if architecture not in KNOWN:
        KNOWN[architecture] = factory.mktemp("sound") / f"{architecture}.gguf"
        save_gguf(KNOWN[architecture], architecture)
    return KNOWN[architecture]


def test_every_architecture_has_a_model_here() -> None:
    assert set(MODELS) - NAMED_LIKE.keys() == set(ARCHITECTURES)
    assert set(NAMED_LIKE.values()) == {name for name, one in ARCHITECTURES.items() if one.sparse is not None}


def test_two_thousand_damaged_models_are_described_or_refused(tmp_path: Path) -> None:
    """All that an engine reads before weights: configuration, names, sizes and defaults. Some tokenizers, too."""
    sound = tmp_path / "sound.gguf"
    save_gguf(sound, types="Q8_0", metadata=describe_tokenizer(BOX_MODEL, "qwen2", 664), hidden_size=64, vocab_size=664)
    data = sound.read_bytes()
    start = min(place.offset for place in GgufModel(sound).file.tensors.values())
    path = tmp_path / "damaged.gguf"
    num_refused = 0
    for seed in range(2000):
        rng = random.Random(seed)
        path.write_bytes(damage(data[:start], rng) + data[start:])
        model = GgufModel(path)
        try:
            config = load_model_config(model.config, model.source)
            fit_to_checkpoint(config, model)
            assert model.generation is not None and model.pooling is not None
            if seed % 10 == 0:
                model.read_tokenizer()
        except ValueError as error:
            num_refused += 1
            assert str(path) in str(error), (seed, error)
    assert 1000 < num_refused < 2000
