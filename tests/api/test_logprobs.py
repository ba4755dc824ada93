"""Log-probabilities are floats that also have vLLM's attributes: logprob, rank, decoded_token."""

import copy
import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.tiny import VOCAB_SIZE, draw_prompts, edit_json, make_tokenizer

from nanovllm import LLM, SamplingParams
from nanovllm.outputs import Logprob


@pytest.fixture(scope="module")
def llm(reciter: Path) -> Iterator[LLM]:
    with LLM(reciter, max_model_len=64) as llm:
        yield llm


@pytest.fixture(scope="module")
def logprob(llm: LLM) -> Logprob:
    """The log-probability of "b" after "a", which is the most likely token by far."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=2, prompt_logprobs=2)
    (output,) = llm.generate("ac", params, use_tqdm=False)
    assert output.prompt_logprobs is not None and output.prompt_logprobs[1] is not None
    likeliest = next(value for value in output.prompt_logprobs[1].values() if value.rank == 1)
    return likeliest


def test_a_logprob_has_the_attributes_of_vllms(logprob: Logprob) -> None:
    assert (type(logprob.logprob), logprob.rank, logprob.decoded_token) == (float, 1, "b")
    assert logprob.logprob == logprob <= 0


def test_a_logprob_is_a_float_wherever_it_goes(logprob: Logprob) -> None:
    number = logprob.logprob
    assert (isinstance(logprob, float), hash(logprob), repr(logprob)) == (True, hash(number), repr(number))
    assert json.dumps([logprob]) == json.dumps([number]) and type(logprob + 0) is float
    for twin in (pickle.loads(pickle.dumps(logprob)), copy.copy(logprob), copy.deepcopy(logprob)):
        assert twin == logprob == number and (twin.rank, twin.decoded_token) == (1, "b")


def test_a_logprob_can_be_made_as_vllms_is() -> None:
    made = Logprob(logprob=-0.5, rank=3, decoded_token="x")
    assert (made, made.rank, made.decoded_token) == (-0.5, 3, "x")
    assert (Logprob(-0.5).rank, Logprob(-0.5).decoded_token) == (None, None)


def test_special_tokens_and_parts_of_characters_are_decoded_by_themselves(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=0, prompt_logprobs=0)
    (output,) = llm.generate("a<|note|>w", params, use_tqdm=False)
    assert output.logprobs is not None and output.prompt_logprobs is not None
    pairs = [*zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)]
    pairs += zip(output.token_ids, output.logprobs, strict=True)
    found = [values[token_id].decoded_token for token_id, values in pairs if values is not None]
    assert found == ["<|note|>", "w", "xyz", "<|end|>"]
    (half,) = llm.generate("m", params, use_tqdm=False)
    assert half.logprobs is not None and half.logprobs[0][half.token_ids[0]].decoded_token == "\ufffd"
    assert half.logprobs[0][half.token_ids[0]].decoded_token == llm.token_text(make_tokenizer().token_to_id("Ã"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rank_is_one_more_than_the_number_of_likelier_tokens(dtype: str, random_model: Path) -> None:
    """bfloat16 has equal logits, which have equal ranks. The rank does not depend on how many tokens were asked for."""
    prompts = draw_prompts([5, 9, 17])
    with LLM(random_model, dtype=dtype, max_model_len=64) as llm:
        few, most = (
            llm.generate(
                prompts,
                [SamplingParams(2.0, 6, logprobs=k, prompt_logprobs=k, seed=i) for i, k in enumerate(ks)],
                use_tqdm=False,
            )
            for ks in ((0, 1, 3), (VOCAB_SIZE,) * 3)
        )
    seen = set()
    for one, other in zip(few, most, strict=True):
        assert one.token_ids == other.token_ids and one.logprobs is not None and other.logprobs is not None
        rows = [*one.logprobs, *(one.prompt_logprobs or [])[1:]]
        full = [*other.logprobs, *(other.prompt_logprobs or [])[1:]]
        for row, everything in zip(rows, full, strict=True):
            assert row is not None and everything is not None and len(everything) == VOCAB_SIZE
            for token_id, value in row.items():
                rank = 1 + sum(other > value for other in everything.values())
                assert value.rank == everything[token_id].rank == rank
                assert value.decoded_token is None, "this model has no tokenizer"
                seen.add(rank)
    assert len(seen) > 10


def test_a_model_without_a_tokenizer_has_ranks_only(reciter: Path, tmp_path: Path) -> None:
    for path in reciter.iterdir():
        if "tokenizer" not in path.name:
            (tmp_path / path.name).symlink_to(path)
    edit_json(tmp_path / "config.json")
    with LLM(tmp_path, max_model_len=64) as llm:
        (output,) = llm.generate([[1, 2]], SamplingParams(temperature=0, max_tokens=1, logprobs=0), use_tqdm=False)
    assert output.logprobs is not None
    (value,) = output.logprobs[0].values()
    assert (value.rank, value.decoded_token) == (1, None)
