"""Whatever requests ask for, in any company, in small pools and with drafts, each gets what it gets alone.

With the CPU kernels all that comes back is compared, log-probabilities included, bit for bit.
"""

import random
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from helpers.integrity import check_scheduler
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from nanovllm import LLM, Output, SamplingParams
from nanovllm.backends.cpu.backend import CpuBackend

if reason := CpuBackend.why_cannot(torch.device("cpu")):
    pytest.skip(reason, allow_module_level=True)

BASE: dict[str, Any] = {"dtype": "float32", "attention_backend": "cpu", "max_model_len": 128, "kvcache_block_size": 16}
SMALL = {"num_kvcache_blocks": 10, "max_num_batched_tokens": 23, "max_num_seqs": 6}
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
ENGINES: dict[str, dict[str, Any]] = {
    "room for all": {"num_kvcache_blocks": 64},
    "preempted and in chunks": SMALL,
    "one token a step": {"num_kvcache_blocks": 12, "max_num_batched_tokens": 1, "max_num_seqs": 3},
    "without prefix cache": SMALL | {"enable_prefix_caching": False},
    "drafts from text": SMALL | {"speculative_config": NGRAM},
    "drafts from a model": SMALL | {"speculative_config": {"model": "tiny-qwen3", "num_speculative_tokens": 3}},
    "keys and values in one byte": SMALL | {"kv_cache_dtype": "int8"},
    "drafts from a model, and keys and values in one byte": SMALL
    | {"kv_cache_dtype": "int8", "speculative_config": {"model": "tiny-qwen3", "num_speculative_tokens": 3}},
}
VOCAB_SIZE = 664
RECORD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yé"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TEXTS = [
    *(
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        for question in ("count from 3 to 9", "what is the capital of Japan?")
    ),
    "Once upon a time there was a small cat that liked the sun. " * 3,
    "aaaa " * 10,
]

token_ids = st.integers(0, VOCAB_SIZE - 1)
some_ids = st.builds(lambda seed: random.Random(seed).sample(range(VOCAB_SIZE), 20), st.integers(0, 99))
OPTIONAL: dict[str, st.SearchStrategy[Any]] = {
    "top_k": st.sampled_from([1, 3, 40]),
    "top_p": st.sampled_from([0.3, 0.9]),
    "min_p": st.sampled_from([0.05, 0.3]),
    "logprobs": st.sampled_from([0, 3]),
    "prompt_logprobs": st.sampled_from([0, 2]),
    "stop": st.sampled_from([" ", "e", ["th", "5"], "is To", ", 6, "]),
    "include_stop_str_in_output": st.booleans(),
    "stop_token_ids": some_ids,
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "min_tokens": st.sampled_from([1, 8]),
    "repetition_penalty": st.sampled_from([0.7, 1.3]),
    "presence_penalty": st.sampled_from([-1.0, 0.8]),
    "frequency_penalty": st.sampled_from([-0.5, 1.0]),
    "logit_bias": st.dictionaries(token_ids, st.sampled_from([-100.0, 3.0, 8.0]), max_size=5),
    "allowed_token_ids": st.just(list(range(0, VOCAB_SIZE, 2))),
    "bad_words": st.lists(st.sampled_from(["To", "the", "5", "is Tokyo", "e", "capital of"]), min_size=1, max_size=2),
    "structured_outputs": st.sampled_from(
        [
            {"regex": "[a-z ]{3,12}"},
            {"choice": ["Tokyo", "The capital"]},
            {"json": RECORD},
            {"json": {"type": "integer"}},
        ]
    ),
    "n": st.sampled_from([2, 3]),
}
if find_spec("llguidance") is None:
    del OPTIONAL["structured_outputs"]


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[int] | str, SamplingParams]:
    prompt = draw(st.sampled_from(TEXTS) | st.lists(token_ids, min_size=1, max_size=60))
    names = draw(st.sets(st.sampled_from(sorted(OPTIONAL)), max_size=5))
    fields = {name: draw(OPTIONAL[name]) for name in sorted(names)}
    fields["temperature"] = draw(st.sampled_from([0.7, 1.0, 1.5] if "n" in fields else [0.0, 0.0, 0.7, 1.5]))
    fields["max_tokens"] = draw(st.sampled_from([8, 12, 25, None]))
    if "structured_outputs" in fields:
        fields.pop("ignore_eos", None)
    elif "prompt_logprobs" in fields and not fields.keys() & {"n", "min_tokens"} and draw(st.booleans()):
        fields["max_tokens"] = 0
    return prompt, SamplingParams(seed=draw(st.integers(0, 9)), **fields)


@pytest.fixture(scope="module")
def alone(together: LLM) -> Iterator[LLM]:
    """An engine for one request at a time, whose keys and values have the format of the other engine's."""
    options = BASE | {"kv_cache_dtype": together.engine.config.kv_cache_dtype}
    with LLM("tiny-qwen3", **options, num_kvcache_blocks=64, max_num_seqs=16, enable_prefix_caching=False) as llm:
        yield llm


@pytest.fixture(scope="module", params=ENGINES.values(), ids=ENGINES.keys())
def together(request: pytest.FixtureRequest) -> Iterator[LLM]:
    from helpers.fakes_drafts import FREE

    with LLM("tiny-qwen3", **BASE, **request.param) as llm:
        if llm.engine.scheduler.speculation is not None:
            llm.engine.scheduler.speculation.costs = FREE
        yield llm


def seen(output: Output) -> dict[str, Any]:
    """Return an output without the fields that depend on a request's place among others."""
    error = output.error and output.error.split(": ", 1)[1]
    return {**output, "num_cached_tokens": None, "error": error}


def check(alone: LLM, together: LLM, given_requests: list[tuple[Any, SamplingParams]], depth: int, leave: bool) -> None:
    expected = [seen(alone.generate(*request, use_tqdm=False)[0]) for request in given_requests]
    together.engine.depth = 1 if together.engine.scheduler.speculation else depth
    if leave:  # an abort in the middle
        stream = together.stream(given_requests)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
    prompts, params = zip(*given_requests, strict=True)
    outputs = together.generate(prompts, params, use_tqdm=False)
    assert list(map(seen, outputs)) == expected
    scheduler = together.engine.scheduler
    check_scheduler(scheduler)
    assert scheduler.block_manager.num_used == 0 and not scheduler.edited_rows


patient = settings(deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink])
mixes = given(
    given_requests=st.lists(requests(), min_size=2, max_size=12), depth=st.sampled_from([1, 2]), leave=st.booleans()
)


@pytest.mark.parametrize("together", [SMALL | {"speculative_config": NGRAM}], ids=["drafts from text"], indirect=True)
@settings(patient, max_examples=5, derandomize=True)
@mixes
def test_some_mixes_of_requests_get_what_each_gets_alone(alone: LLM, together: LLM, **mix: Any) -> None:
    """The same ones each time."""
    check(alone, together, **mix)


@pytest.mark.slow
@settings(patient, max_examples=12)
@mixes
def test_whatever_is_asked_for_together_a_request_gets_what_it_gets_alone(
    alone: LLM, together: LLM, **mix: Any
) -> None:
    check(alone, together, **mix)
