"""Qwen3.5, whose layers are Gated DeltaNets and gated attention, says token for token what transformers says."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.hybrids import save_hub_form, save_hybrid
from helpers.tiny import CROWDED, VOCAB_SIZE, draw_prompts, logits_of, save_random
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from nanovllm import LLM, SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.features.families.qwen3_5.ops import RowState
from nanovllm.features.families.qwen3_5.states import count_rows_that_fit, fit_rows
from nanovllm.load import make_quantizer, resolve_options
from nanovllm.models.sizes import Sizes
from nanovllm.runner.kv_memory import count_blocks

VARIANTS: dict[str, dict[str, Any]] = {
    "two value heads a key head": {},
    "one, untied": {"linear_num_value_heads": 2, "tie_word_embeddings": False},
    "other layers": {"num_hidden_layers": 3, "layer_types": ["full_attention", "linear_attention", "linear_attention"]},
    "odd sizes, half of a head rotates": {
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 9,
        "linear_key_head_dim": 10,
        "linear_value_head_dim": 14,
        "linear_conv_kernel_dim": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        "attention_bias": True,
    },
}
OPTIONS = {**CROWDED, "max_model_len": 320, "num_kvcache_blocks": 24}
LENGTHS = [1, 2, 3, 4, 5, 17, 63, 64, 65, 90, 130, 300]


def say(llm: LLM, prompts: list[list[int]], count: int = 12, **params: Any) -> list[list[int]]:
    asked = SamplingParams(temperature=0, ignore_eos=True, max_tokens=count, **params)
    return [output["token_ids"] for output in llm.generate(prompts, asked, use_tqdm=False)]


def check_greedy(model: PreTrainedModel, prompts: list[list[int]], answers: list[list[int]]) -> None:
    """Fail unless every token of every answer is transformers' likeliest after those before it."""
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = logits_of(model, prompt + answer)
        assert answer == logits[len(prompt) - 1 : -1].argmax(1).tolist(), len(prompt)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hybrid")


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return save_hybrid(folder)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_tokens_are_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    model = save_hybrid(tmp_path, **changes)
    prompts = draw_prompts(LENGTHS)
    with LLM(tmp_path, **OPTIONS) as llm:
        answers = say(llm, prompts, 30)
        assert llm.stats()["num_preemptions"]
    check_greedy(model, prompts, answers)


@pytest.mark.parametrize("budget", [1, 7, 64])
def test_chunks_of_any_length_carry_the_state_on(budget: int, folder: Path, model: PreTrainedModel) -> None:
    longest = 100 if budget == 1 else 300  # one token a step takes seconds
    prompts = draw_prompts([1, 6, 7, 8, 65, longest], seed=budget)
    with LLM(folder, **OPTIONS | {"max_num_batched_tokens": budget}) as llm:
        answers = say(llm, prompts)
    check_greedy(model, prompts, answers)


def test_a_new_owner_finds_nothing_of_the_last_one(folder: Path, model: PreTrainedModel) -> None:
    """One row serves all prompts in turn, and before the first one its state holds what is no number."""
    prompts = draw_prompts([1, 1, 40, 2, 70])
    with LLM(folder, **OPTIONS | {"max_num_seqs": 1}) as llm:
        states = [cache for cache in llm.engine.runner.caches if isinstance(cache, RowState)]  # type: ignore[attr-defined]
        for state in states:
            state.conv.fill_(torch.nan)
            state.recurrent.fill_(torch.nan)
        assert len(states) == 3 and {len(state.conv) for state in states} == {2}
        answers = say(llm, prompts)
    check_greedy(model, prompts, answers)


def test_scores_are_within_a_thousandth_of_transformers(folder: Path, model: PreTrainedModel) -> None:
    prompts = draw_prompts([2, 30, 200])
    with LLM(folder, **OPTIONS) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
        scores = llm.score(prompts, [[1, 2, 3]] * 3, use_tqdm=False)
    for prompt, output, score in zip(prompts, outputs, scores, strict=True):
        expected = logits_of(model, [*prompt, 1, 2, 3]).log_softmax(1)
        ours = [float(entry[token]) for token, entry in zip(prompt[1:], output["prompt_logprobs"][1:], strict=True)]
        theirs = expected[: len(prompt) - 1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(ours), theirs, atol=1e-3, rtol=0)
        total = sum(expected[len(prompt) - 1 + i, token].item() for i, token in enumerate([1, 2, 3]))
        assert score["logprob"] == pytest.approx(total, abs=3e-3)


def test_several_completions_embeddings_and_sleep(folder: Path, model: PreTrainedModel) -> None:
    (prompt,) = draw_prompts([50])
    several = SamplingParams(n=3, temperature=1.0, seed=1, ignore_eos=True, max_tokens=6)
    with LLM(folder, **OPTIONS | {"max_num_seqs": 1}) as llm:
        (one_by_one,) = llm.generate([prompt], several, use_tqdm=False)
    with LLM(folder, **OPTIONS) as llm:
        (together,) = llm.generate([prompt], several, use_tqdm=False)
        assert together.outputs == one_by_one.outputs
        (embedding,) = llm.embed([prompt], use_tqdm=False)
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            check_greedy(model, [prompt], say(llm, [prompt]))
    hidden = model.model(torch.tensor([prompt])).last_hidden_state[0, -1]
    ours = torch.as_tensor(embedding["embedding"])
    torch.testing.assert_close(ours, torch.nn.functional.normalize(hidden, dim=0).detach(), atol=1e-4, rtol=0)


def test_new_weights_replace_the_old_ones(folder: Path, model: PreTrainedModel, tmp_path: Path) -> None:
    other = save_hybrid(
        tmp_path, linear_num_value_heads=4, vocab_size=VOCAB_SIZE, tie_word_embeddings=True, rms_norm_eps=1e-6
    )
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.25)
    prompts = draw_prompts([20, 60])
    with LLM(folder, **OPTIONS) as llm:
        check_greedy(model, prompts, say(llm, prompts))
        llm.load_weights(other.state_dict().items())
        check_greedy(other, prompts, say(llm, prompts))


@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_two_ranks_say_the_same(ranks: dict[str, Any], folder: Path, model: PreTrainedModel, local_ranks: None) -> None:
    """The first stage has no keys and values, so the second one decides how many blocks there are."""
    prompts = draw_prompts(LENGTHS[:9])
    options = OPTIONS | ranks | {"num_kvcache_blocks": None, "kvcache_memory_bytes": 1 << 20}
    with LLM(folder, **options) as llm:
        answers = say(llm, prompts)
        assert 20 < llm.stats()["num_blocks"] < 1000
    check_greedy(model, prompts, answers)


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_form_on_the_hub_loads(is_tied: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The text model is nested beside one for pictures, and beside a head that predicts several tokens."""
    model = save_hub_form(tmp_path, is_tied)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "model.language_model.embed_tokens.weight" in tensors and "model.visual.patch_embed.proj.weight" in tensors
    tensors["mtp.fc.weight"] = torch.ones(2, 2)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    prompts = draw_prompts([1, 9, 60])
    with caplog.at_level(logging.INFO, "nanovllm"), LLM(tmp_path, **OPTIONS) as llm:
        answers = say(llm, prompts)
    check_greedy(model, prompts, answers)
    (record,) = [record for record in caplog.records if "are not read" in record.message]
    assert "22 tensors are not read: model.visual.blocks.0.attn.proj.bias" in record.message


# ---- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"enable_prefix_caching": True},
            "enable_prefix_caching is True, and this model keeps a state .* set it to False",
        ),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "speculative_config asks for drafts",
        ),
        ({"tensor_parallel_size": 4}, "num_key_heads is 2, which 4 ranks cannot share evenly"),
    ],
)
def test_what_a_state_cannot_do_is_refused(
    options: dict[str, Any], message: str, folder: Path, model: PreTrainedModel
) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(folder, **OPTIONS | options)


def test_it_cannot_draft_for_another_model(folder: Path, model: PreTrainedModel, tmp_path: Path) -> None:
    save_random(tmp_path, max_position_embeddings=512)
    with pytest.raises(ValueError, match=r"cannot draft .*: it keeps a state for each sequence"):
        LLM(tmp_path, **OPTIONS, speculative_config={"model": str(folder), "num_speculative_tokens": 2})


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, "nanovllm"):
        yield caplog


def test_the_log_says_how_many_states_there_are(
    log: pytest.LogCaptureFixture, folder: Path, model: PreTrainedModel
) -> None:
    options = {name: value for name, value in OPTIONS.items() if name != "max_num_seqs"}
    with LLM(folder, **options) as llm:
        assert llm.engine.config.max_num_seqs == 512
    messages = [record.message for record in log.records]
    assert sum(message.startswith("max_num_seqs is 512: the state of a sequence takes") for message in messages) == 1
    assert sum(message.startswith("prefix caching is off") for message in messages) == 1


def test_states_and_keys_share_the_memory() -> None:
    assert fit_rows(100 << 20, 1 << 20) == 49  # and one for padding
    assert fit_rows(1 << 40, 1 << 20) == 512
    assert fit_rows(0, 1 << 20) == 1


def test_an_estimate_counts_the_states() -> None:
    """The 0.8B: 18 layers of 16 heads, 128 by 128 in float32, and three inputs of 6,144 channels in bfloat16."""
    from nanovllm.apps.estimate import estimate, fetch_config

    row = 18 * (16 * 128 * 128 * 4 + 3 * 6144 * 2)
    config = fetch_config("qwen3.5-0.8b")
    large = estimate(config, EngineConfig("qwen3.5-0.8b"), 80 << 30)
    assert large.config.max_num_seqs == 512 and large.memory.states == 513 * row
    small = estimate(config, EngineConfig("qwen3.5-0.8b"), 8 << 30)
    assert small.config.max_num_seqs < 512 and small.fits
    assert f"states of {small.config.max_num_seqs} sequences" in small.describe()
    stages = estimate(config, EngineConfig("qwen3.5-0.8b", pipeline_parallel_size=8), 8 << 30)
    assert stages.fits and stages.kv_bytes_per_token > 0, "the first stages have no keys and values"


def test_quantised_weights_leave_room_for_more_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU with 12 GiB free, the 4B takes 8 GiB in bfloat16, and half of that in int8."""
    from nanovllm.apps.estimate import estimate, fetch_config

    config = fetch_config("qwen3.5-4b")
    sizes = Sizes(config)
    dense = EngineConfig("qwen3.5-4b")
    int8 = EngineConfig("qwen3.5-4b", quantization="int8")
    assert make_quantizer(resolve_options(dense, config), config) is None
    quantizer = make_quantizer(resolve_options(int8, config), config)
    assert quantizer is not None
    weights = sizes.weight_bytes(torch.bfloat16, quantizer)
    assert weights < 1.1 * sizes.num_parameters
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (12 << 30, 24 << 30))
    on_gpu = replace(resolve_options(int8, config), device="cuda:0", attention_backend="torch")
    rows = count_rows_that_fit(on_gpu, weights, sizes.row_bytes(torch.bfloat16))
    assert rows == fit_rows((12 << 30) - weights, sizes.row_bytes(torch.bfloat16))
    assert rows > count_rows_that_fit(on_gpu, sizes.weight_bytes(torch.bfloat16), sizes.row_bytes(torch.bfloat16))
    share = count_rows_that_fit(replace(on_gpu, num_devices=2), weights // 2, sizes.row_bytes(torch.bfloat16))
    assert share == fit_rows((12 << 30) - weights // 2, sizes.row_bytes(torch.bfloat16) // 2), "one of two GPUs"
    estimates = [estimate(config, options, 12 << 30) for options in (dense, int8)]
    assert estimates[1].memory.weights == weights
    assert estimates[0].config.max_num_seqs < estimates[1].config.max_num_seqs < 512


def test_states_that_do_not_fit_are_refused_with_the_number_of_rows(
    folder: Path, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(folder, **OPTIONS) as llm:
        runner = llm.engine.runner
        least = runner.count_state_bytes()
        monkeypatch.setattr(runner.backend, "free_memory", lambda: least - 1)
        with pytest.raises(ValueError, match=rf"the states of {OPTIONS['max_num_seqs']} rows .* lower max_num_seqs"):
            count_blocks(runner)
        monkeypatch.setattr(runner.backend, "free_memory", lambda: max(least, 1 << 30))
        assert count_blocks(runner) == OPTIONS["num_kvcache_blocks"]


# ---- compiled kernels


@pytest.mark.parametrize("backend", ["cpu", pytest.param("triton", marks=pytest.mark.slow)])
def test_compiled_kernels_say_the_same(backend: str, folder: Path, model: PreTrainedModel) -> None:
    prompts = draw_prompts([1, 9])
    with LLM(folder, **OPTIONS | {"attention_backend": backend, "max_num_batched_tokens": 6}) as llm:
        answers = say(llm, prompts, 3)
    check_greedy(model, prompts, answers)


@pytest.mark.parametrize(("dtype", "quantization"), [("float32", None), ("bfloat16", None), ("bfloat16", "int8")])
def test_a_request_has_the_same_bits_in_any_company(
    dtype: str, quantization: str | None, folder: Path, model: PreTrainedModel
) -> None:
    """With the CPU kernels log-probabilities of prompts and outputs are equal: alone, together, preempted, chunked."""
    prompts = draw_prompts(LENGTHS[1:])
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=20, logprobs=2, prompt_logprobs=1)

    def run(some: list[list[int]], **options: Any) -> list[tuple[Any, ...]]:
        ours = OPTIONS | {"attention_backend": "cpu", "dtype": dtype, "quantization": quantization}
        with LLM(folder, **ours | options) as llm:
            outputs = llm.generate(some, params, use_tqdm=False)
        return [(output["token_ids"], output["logprobs"], output["prompt_logprobs"]) for output in outputs]

    alone = run(prompts, max_num_seqs=1, max_num_batched_tokens=2048)
    for budget in (7, 48, 2048):
        assert run(prompts, max_num_batched_tokens=budget) == alone
