"""The model is Qwen3 as published: its tokens and logits are transformers'."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny import BLOCK, SMALL, draw_prompts, edit_json, greedy_all, logits_of, save_random
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM

from nanovllm import LLM, SamplingParams

LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 130]
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "one kv head": {"num_key_value_heads": 1},
    "two kv heads": {"num_key_value_heads": 2},
    "a kv head for every head": {"num_key_value_heads": 4},
    "biased qkv": {"attention_bias": True},
    "untied": {"tie_word_embeddings": False},
    "head_dim is not hidden_size / heads": {"hidden_size": 72, "num_attention_heads": 6, "head_dim": 24},
    "odd sizes": {"vocab_size": 503, "hidden_size": 52, "intermediate_size": 90, "head_dim": 20},
    "rope theta and norm epsilon": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rms_norm_eps": 0.1,
    },
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}},
    "yarn rope": {"rope_parameters": YARN, "max_position_embeddings": 64},
    "yarn rope with its own attention factor": {"rope_parameters": {**YARN, "attention_factor": 0.7}},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "sharded files": {"max_shard_size": "60KB", "num_hidden_layers": 3},
}


def engine(folder: Path, **options: Any) -> LLM:
    return LLM(folder, **SMALL | {"max_model_len": 192} | options)


def load(folder: Path, dtype: torch.dtype) -> Qwen3ForCausalLM:
    """transformers' model of a checkpoint; `.to(dtype)` would round its rotary frequencies as well."""
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def assert_equal_greedy_tokens(folder: Path, model: Qwen3ForCausalLM, count: int = 24) -> None:
    prompts = draw_prompts(LENGTHS)
    with engine(folder) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=count), use_tqdm=False)
    tokens = [output["token_ids"] for output in outputs]
    assert tokens == greedy_all(model, prompts, count, tokens)


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS.keys())
def test_greedy_tokens_are_those_of_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    model = save_random(tmp_path, seed=len(str(changes)), **changes)
    if "max_shard_size" in changes:
        assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_equal_greedy_tokens(tmp_path, model)


@pytest.mark.parametrize("head", ["equal", "other"])
def test_a_tied_checkpoint_may_carry_its_head_all_the_same(head: str, tmp_path: Path) -> None:
    """The published Qwen3-0.6B does, with equal values. Other values are a head of its own, as in transformers."""
    save_random(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone() if head == "equal" else -embedding
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_equal_greedy_tokens(tmp_path, load(tmp_path, torch.float32))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 1000000, "rope_scaling": None},
        {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 3.0}},
        {
            "rope_theta": 10000.0,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        },
    ],
    ids=["plain", "linear", "yarn"],
)
def test_rope_may_be_written_as_before_transformers_5(rope: dict[str, Any], tmp_path: Path) -> None:
    """As all published Qwen3 write it; reading only the new form leaves theta at its default, without an error."""
    save_random(tmp_path)
    edit_json(tmp_path / "config.json", rope_parameters=None, **rope)
    model = load(tmp_path, torch.float32)
    assert model.config.rope_parameters["rope_theta"] == rope["rope_theta"]
    assert_equal_greedy_tokens(tmp_path, model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_16_bit_checkpoint_computes_in_float32_where_asked(dtype: torch.dtype, tmp_path: Path) -> None:
    save_random(tmp_path).to(dtype).save_pretrained(tmp_path)
    assert_equal_greedy_tokens(tmp_path, load(tmp_path, torch.float32))


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    """Teacher-forced: the engine's distribution after each prefix of a text, against transformers' in float32.

    The tolerance is what bfloat16 itself costs: twice the largest error that transformers' own bfloat16 makes on the
    same text (two computations that round in different places). It must be small beside the logits, or it says
    nothing. Where float32 prefers a token by more than two tolerances, both errors together cannot change the choice.
    """
    save_random(tmp_path, num_key_value_heads=1, attention_bias=True).to(torch.bfloat16).save_pretrained(tmp_path)
    text = draw_prompts([80])[0]
    rounded = logits_of(load(tmp_path, torch.bfloat16), text).log_softmax(-1)
    exact = logits_of(load(tmp_path, torch.float32), text).log_softmax(-1)
    tolerance = 2 * float((rounded - exact).abs().max())
    assert tolerance < exact.std() / 4

    everything = SamplingParams(temperature=0, max_tokens=1, logprobs=exact.shape[1])
    with engine(tmp_path, dtype="bfloat16") as llm:
        outputs = llm.generate([text[: i + 1] for i in range(len(text))], everything, use_tqdm=False)
    logprobs = torch.tensor([[o["logprobs"][0][i] for i in range(exact.shape[1])] for o in outputs])
    assert float((logprobs - exact).abs().max()) < tolerance

    best, second = exact.topk(2).values.unbind(1)
    clear = best - second > 2 * tolerance
    assert clear.sum() >= 10
    chosen = torch.tensor([o["token_ids"][0] for o in outputs])
    assert torch.equal(chosen[clear], exact.argmax(-1)[clear])
