"""max_model_len, left out: the model's own length if the KV cache holds such a sequence, else what it holds.

And what the log says if the KV cache, or a length, gives requests less than they could use.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny import CHAT_TEMPLATE, SMALL, edit_json, save_random, save_reciter

from nanovllm import LLM, SamplingParams
from nanovllm.config import USUAL_LENGTH

LONG = 40960
OPTIONS: dict[str, Any] = {
    **{name: value for name, value in SMALL.items() if name not in ("max_model_len", "num_kvcache_blocks")},
    **{"device": "cpu", "dtype": "float32", "attention_backend": "torch"},
}
TO_THE_END = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    save_random(folder, max_position_embeddings=LONG)
    return folder


def say(llm: LLM, prompts: Any = ([1, 2, 3],), **params: Any) -> list[list[int]]:
    made = SamplingParams(**{"temperature": 0, "max_tokens": 8, "ignore_eos": True, **params})
    return [output.token_ids for output in llm.generate([*prompts], made, use_tqdm=False)]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    caplog.clear()
    return messages


@pytest.mark.parametrize("num_seqs", [2, 64])
def test_it_is_the_models_own_and_the_pool_has_the_size_that_4096_gives_it(
    num_seqs: int, long_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two rows need more than before, for one sequence of the whole length."""
    options = OPTIONS | {"max_num_seqs": num_seqs}
    with LLM(long_model, **options) as llm, LLM(long_model, **options, max_model_len=USUAL_LENGTH) as given:
        assert (llm.max_model_len, given.max_model_len) == (LONG, USUAL_LENGTH)
        num_blocks = [engine.stats()["num_blocks"] for engine in (llm, given)]
        size = llm.engine.config.block_size
        assert num_blocks == [max(num_seqs * USUAL_LENGTH, LONG) // size, num_seqs * USUAL_LENGTH // size]
        assert say(llm) == say(given)
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("pool", [{"num_kvcache_blocks": 6}, {"kvcache_memory_bytes": 6 * 16 * 1024}])
def test_a_pool_that_cannot_hold_it_sets_it_and_one_line_says_so(
    pool: dict[str, int], long_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """2 (K, V) x 2 layers x 2 heads x 32 x 4 bytes a token."""
    with LLM(long_model, **OPTIONS, **pool) as llm:
        (line,) = warnings_of(caplog)
        assert line.startswith(f"max_model_len is 96, not the model's {LONG}: the KV cache holds no longer sequence")
        assert llm.max_model_len == 96
        outputs = llm.generate([[1] * 20, [2] * 90], TO_THE_END, use_tqdm=False)
        assert [len(output.token_ids) for output in outputs] == [76, 6]
        with pytest.raises(ValueError, match="with max_model_len=96 it may have at most 95"):
            say(llm, [[1] * 96])
    with pytest.raises(ValueError, match=r"max_model_len=97 needs 7"):
        LLM(long_model, **OPTIONS, **pool, max_model_len=97)


@pytest.mark.parametrize(
    "kind",
    [
        "tensor_parallel_size",
        "pipeline_parallel_size",
        pytest.param("data_parallel_size", marks=pytest.mark.slow),  # replicas are processes
    ],
)
def test_ranks_and_replicas_agree_on_it(kind: str, long_model: Path, local_ranks: None) -> None:
    with LLM(long_model, **OPTIONS, num_kvcache_blocks=6, **{kind: 2}) as llm:
        assert llm.max_model_len == 96
        outputs = llm.generate([[1] * 20, [2] * 90], TO_THE_END, use_tqdm=False)
        assert [len(output.token_ids) for output in outputs] == [76, 6]


def test_a_draft_model_that_is_made_for_less_sets_it(
    long_model: Path, random_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    drafts = {"model": str(random_model), "num_speculative_tokens": 2}
    with LLM(long_model, **OPTIONS, speculative_config=drafts) as llm:
        assert llm.max_model_len == 512
        (line,) = warnings_of(caplog)
        assert line.startswith(f"max_model_len is 512, not the model's {LONG}: the draft model ")
    with pytest.raises(ValueError, match="made for 512 tokens, and max_model_len is 513"):
        LLM(long_model, **OPTIONS, speculative_config=drafts, max_model_len=513)


def test_max_tokens_that_cannot_be_reached_are_told_once_a_call(
    long_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(long_model, **OPTIONS, max_model_len=64) as llm:
        assert [len(ids) for ids in say(llm, [[1] * 60, [1] * 50, [1] * 4], max_tokens=60)] == [4, 14, 60]
        (line,) = warnings_of(caplog)
        assert line.startswith("a request with max_tokens=60 can get 4 tokens at most: its prompt has 60")
        assert "max_model_len=64" in line
        dict(llm.stream([[1] * 60, [1] * 50], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)))
        assert len(warnings_of(caplog)) == 1
        say(llm, [[1] * 56])
        say(llm, [[1] * 60], max_tokens=None)
        llm.score([[1] * 64], [[1]], use_tqdm=False)
        llm.embed([[1] * 64], use_tqdm=False)
        assert warnings_of(caplog) == []
        llm.submit([1] * 60, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)).result()
        assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_a_pool_that_holds_fewer_sequences_than_may_run_says_so_once(
    kv_cache_dtype: str, long_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Three prompts of two blocks each fit into six blocks. When they grow, one of them must leave."""
    pool = {"max_num_seqs": 6, "block_size": 16, "num_kvcache_blocks": 6, "max_model_len": 64}
    with LLM(long_model, **OPTIONS | pool, kv_cache_dtype=kv_cache_dtype) as llm:
        prompts = [[i] * 17 for i in range(1, 9)]
        tokens = say(llm, prompts, max_tokens=20)
        (line,) = warnings_of(caplog)
        assert line.startswith("the KV cache holds 2 of 6 sequences: ")
        assert ("kv_cache_dtype='int8', which would hold all" in line) == (kv_cache_dtype == "auto")
        assert say(llm, prompts, max_tokens=20) == tokens
        assert warnings_of(caplog) == []


def test_a_chats_line_without_max_tokens_keeps_its_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from nanovllm.apps.jobs.request_lines import LineError, prepare_request, read_request_line
    from nanovllm.apps.jobs.source import Line

    save_reciter(tmp_path)
    edit_json(tmp_path / "config.json", max_position_embeddings=LONG)
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)

    def prepare(llm: LLM, content: str, **body: Any) -> Any:
        body = {"messages": [{"role": "user", "content": content}], **body}
        line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
        return prepare_request(read_request_line(Line(0, json.dumps(line).encode())), llm, "m")

    with LLM(tmp_path, **OPTIONS) as llm:
        assert llm.max_model_len == LONG
        request = prepare(llm, "a" * 4000, ignore_eos=True)
        num_prompt = len(request.prompt_token_ids)
        assert (request.params.max_tokens, request.max_len) == (USUAL_LENGTH, USUAL_LENGTH)
        ((_, output),) = llm.stream([request])
        assert (len(output.token_ids), output.finish_reason) == (USUAL_LENGTH - num_prompt, "length")
        assert warnings_of(caplog) == []
        assert prepare(llm, "a", max_tokens=9000).max_len is None
        assert len(prepare(llm, "a" * 5000, max_tokens=9).prompt_token_ids) > 5000
        with pytest.raises(LineError, match="without max_tokens it may have at most 4095: give max_tokens"):
            prepare(llm, "a" * 5000)
    with LLM(tmp_path, **OPTIONS, max_model_len=5100) as llm:
        assert prepare(llm, "a" * 5000).max_len == 5100


@pytest.mark.slow
def test_tables_of_positions_are_as_long_as_the_model(long_model: Path) -> None:
    """A prompt beyond 4,096 tokens gets the log-probabilities that an engine for exactly that length gives it."""
    prompt = torch.arange(4500).remainder(400).tolist()
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=0, ignore_eos=True)
    found = []
    for options in ({}, {"max_model_len": 4502}):
        with LLM(long_model, **OPTIONS | options | {"max_num_batched_tokens": 2048}) as llm:
            found += llm.generate([prompt], params, use_tqdm=False)
    assert found[0].token_ids == found[1].token_ids and found[0].logprobs == found[1].logprobs
