"""Several threads and asyncio tasks share an engine: each gets what it would get alone, and nobody waits for ever."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from nanovllm import LLM, SamplingParams

PROMPTS = ["a", "c", "A", "0", "ab", "x", "xyz", "m"]
PARAMS = [SamplingParams(temperature=1, max_tokens=8 + i, seed=i, ignore_eos=True) for i in range(len(PROMPTS))]


@pytest.fixture
def llm(reciter: Path) -> Iterator[LLM]:
    with LLM(reciter, max_model_len=64, kvcache_memory_bytes=16 << 20) as llm:
        yield llm


def test_many_threads_get_what_each_would_get_alone(llm: LLM) -> None:
    expected = [output.token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    num_steps = llm.stats()["num_steps"]
    for _ in range(3):
        with ThreadPoolExecutor(len(PROMPTS)) as threads:
            futures = list(threads.map(llm.submit, PROMPTS, PARAMS))
        assert [future.result(timeout=60).token_ids for future in futures] == expected
    assert (llm.stats()["num_steps"] - num_steps) < 3 * sum(map(len, expected)), "they share steps"


def test_threads_that_ask_for_edits_at_the_same_moment_share_one_editor(llm: LLM) -> None:
    """A second one would count penalties anew for rows that the first one knows."""
    from nanovllm.features.edits.editing import Editing

    engine = llm.engine
    make_editor = engine._make_editor
    made = []

    def make_slowly() -> Editing:
        time.sleep(0.1)
        made.append(make_editor())
        return made[-1]

    engine._make_editor = make_slowly
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, frequency_penalty=1.0)
    with ThreadPoolExecutor(4) as threads:
        futures = list(threads.map(lambda prompt: llm.submit(prompt, params), PROMPTS[:4]))
    assert all(future.result(timeout=60).finish_reason == "length" for future in futures)
    assert made == [engine.editor]


def test_tasks_of_an_event_loop_get_what_each_would_get_alone(llm: LLM) -> None:
    async def ask(i: int) -> list[int]:
        return (await asyncio.wrap_future(llm.submit(PROMPTS[i], PARAMS[i]))).token_ids

    async def ask_all() -> list[list[int]]:
        return await asyncio.gather(*map(ask, range(len(PROMPTS))))

    expected = asyncio.run(ask_all())
    assert [output.token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)] == expected


def test_a_bad_request_is_refused_at_once_and_stops_no_other(llm: LLM) -> None:
    future = llm.submit("a", PARAMS[0])
    with pytest.raises(ValueError, match="the prompt is empty"):
        llm.submit("", PARAMS[0])
    assert len(future.result(timeout=60).token_ids) == 8


def test_generate_says_how_several_threads_share_an_engine(llm: LLM) -> None:
    stream = llm.stream(["a", "a"], PARAMS[7])
    with closing(stream):  # type: ignore[type-var]
        next(stream)
        with pytest.raises(RuntimeError, match=r"is open: finish or close it first; several threads .* use submit\(\)"):
            llm.generate("a", PARAMS[0], use_tqdm=False)
        with pytest.raises(RuntimeError, match="is open"):
            llm.submit("a", PARAMS[0]).result(timeout=60)
    assert len(llm.submit("a", PARAMS[0]).result(timeout=60).token_ids) == 8


def test_an_engine_that_fails_tells_those_who_wait_and_goes_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down() -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as broken:
        broken.setattr(llm.engine, "step", break_down)
        for future in [llm.submit("a", PARAMS[0]) for _ in range(4)]:
            with pytest.raises(MemoryError, match="no room"):
                future.result(timeout=60)
    assert len(llm.submit("a", PARAMS[0]).result(timeout=60).token_ids) == 8
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.submit("a", PARAMS[0]).result(timeout=60)
