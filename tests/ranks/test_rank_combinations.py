"""Two ranks with grammars, completions, drafts and preemption at once: each request gets what it gets alone."""

import json
import re
from typing import Any

import pytest
from helpers.integrity import check_scheduler

from nanovllm import LLM, Output, SamplingParams

BASE: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 128, "kvcache_block_size": 16}
SMALL = {"num_kvcache_blocks": 10, "max_num_batched_tokens": 23, "max_num_seqs": 6}
DRAFTS: dict[str, Any] = {
    "none": None,
    "ngrams": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "a model": {"model": "tiny-qwen3", "num_speculative_tokens": 3},
}
RECORD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yé"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
GRAMMARS: list[dict[str, Any] | None] = [
    {"json": RECORD},
    {"regex": "[a-z ]{3,12}"},
    {"choice": ["Tokyo", "The capital"]},
    None,
]


def make_requests() -> list[tuple[str, SamplingParams]]:
    """Every grammar with one and with several completions, some greedy, and some with penalties."""
    requests = []
    for number in range(12):
        n = 1 + number // 4
        temperature = 0.0 if n == 1 and number % 2 else 0.8
        params = SamplingParams(
            temperature=temperature,
            seed=number,
            n=n,
            max_tokens=32,
            repetition_penalty=1.2 if number % 3 == 0 else 1.0,
            structured_outputs=GRAMMARS[number % 4],
        )
        requests.append((f"<|im_start|>user\ncount from {number} to 9<|im_end|>\n<|im_start|>assistant\n", params))
    return requests


def read_texts(output: Output) -> list[tuple[str, list[int], str]]:
    """(text, token ids, reason) of each completion of a request."""
    return [(one.text, one.token_ids, one.finish_reason) for one in output.outputs]


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """On one rank, with room for all, and without drafts."""
    prompts, params = zip(*make_requests(), strict=True)
    with LLM("tiny-qwen3", **BASE, num_kvcache_blocks=256) as llm:
        return [read_texts(output) for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafts", "kind"),
    [("none", "tensor_parallel_size"), ("ngrams", "pipeline_parallel_size"), ("a model", "tensor_parallel_size")],
)
def test_two_ranks_with_grammars_completions_drafts_and_preemption(drafts: str, kind: str, expected: list[Any]) -> None:
    from helpers.fakes_drafts import FREE

    prompts, params = zip(*make_requests(), strict=True)
    options = BASE | SMALL | {kind: 2, "speculative_config": DRAFTS[drafts]}
    with LLM("tiny-qwen3", **options) as llm:
        scheduler = llm.engine.scheduler
        if scheduler.speculation is not None:
            scheduler.speculation.costs = FREE
        outputs = [read_texts(output) for output in llm.generate(prompts, params, use_tqdm=False)]
        assert outputs == expected
        stats = llm.stats()
        assert stats["num_preemptions"] > 0
        assert (stats["num_accepted_tokens"] > 0) == (drafts != "none")
        assert scheduler.block_manager.num_used == 0
        check_scheduler(scheduler)
    for (_, asked), completions in zip(make_requests(), outputs, strict=True):
        assert len(completions) == asked.n
        for text, _, reason in completions:
            grammar = asked.structured_outputs
            if grammar is None or reason != "stop":
                continue
            if grammar.json is not None:
                found = json.loads(text)
                assert 0 <= found["a"] <= 99 and found["b"] in ("x", "yé")
            elif grammar.regex is not None:
                assert re.fullmatch(grammar.regex, text)
            else:
                assert text in (grammar.choice or ())
