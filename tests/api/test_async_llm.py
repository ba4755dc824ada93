"""AsyncLLM: tasks of an asyncio loop get the tokens of their requests as they come, from shared steps."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.paths import BOX_MODEL

from nanovllm import LLM, SamplingParams
from nanovllm.apps.standin.async_llm import AsyncLLM, Call
from nanovllm.apps.standin.params import RequestOutputKind
from nanovllm.apps.standin.params import SamplingParams as VllmParams
from nanovllm.engine.claim import ClosedError
from nanovllm.features.streaming import Pieces

OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 96, "max_num_seqs": 3}
PROMPTS = ("Once upon a time", "1 + 2 =", "count from 3 to 9", "The best way")
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0, stop="zzz")
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(BOX_MODEL, **OPTIONS) as llm:
        yield llm


@pytest.fixture
def engine(llm: LLM) -> AsyncLLM:
    return AsyncLLM(llm)


async def collect(engine: AsyncLLM, name: str, prompt: str, params: SamplingParams) -> list[Any]:
    return [output async for output in engine.generate(prompt, params, name)]


def test_tasks_share_steps_and_each_output_is_one_of_the_same_text_growing(llm: LLM, engine: AsyncLLM) -> None:
    async def run() -> list[list[Any]]:
        return await asyncio.gather(*(collect(engine, str(i), p, PARAMS) for i, p in enumerate(PROMPTS)))

    expected = llm.generate(list(PROMPTS), PARAMS, use_tqdm=False)
    before = llm.stats()["num_steps"]
    found = asyncio.run(run())
    assert llm.stats()["num_steps"] - before < 30, "4 requests of 12 tokens, of which 3 run at a time"
    for i, (outputs, whole) in enumerate(zip(found, expected, strict=True)):
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert len(outputs) > 4 and {output.request_id for output in outputs} == {str(i)}
        assert outputs[-1].outputs[0].text == whole.text and outputs[-1].token_ids == whole.token_ids
        assert outputs[-1].cumulative_logprob == pytest.approx(whole.cumulative_logprob, abs=1e-4)
        for output in outputs:
            assert whole.text.startswith(output.text) and len(output.logprobs) == len(output.token_ids)
            assert whole.token_ids[: len(output.token_ids)] == output.token_ids
    assert llm.is_finished()


@pytest.mark.parametrize("kind", ["DELTA", "FINAL_ONLY"])
def test_the_outputs_are_of_the_kind_that_was_asked_for(llm: LLM, engine: AsyncLLM, kind: str) -> None:
    params = VllmParams(temperature=0, max_tokens=12, logprobs=0, output_kind=RequestOutputKind[kind]).clone()
    outputs = asyncio.run(collect(engine, "x", PROMPTS[0], params))
    (whole,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    assert "".join(output.text for output in outputs) == whole.text
    assert [token_id for output in outputs for token_id in output.token_ids] == whole.token_ids
    assert sum(len(output.logprobs) for output in outputs) == len(whole.token_ids)
    assert (len(outputs) == 1) == (kind == "FINAL_ONLY")


def test_an_output_does_not_grow_while_other_tasks_run_steps(llm: LLM, engine: AsyncLLM) -> None:
    request = llm.prepare(PROMPTS[0], PARAMS)
    with llm.claim_loop("add_request()"):
        seq = llm.engine.add(request)
    output, _ = engine._claimed(engine._advance, Call("x", seq), Pieces(request, llm.engine.tokenizer), 0)
    while llm.engine.has_work:
        llm.step()
    assert len(output.logprobs) == len(output.token_ids) < 12 == len(seq.logprobs)


def test_a_pause_runs_no_step_and_a_task_that_leaves_aborts_its_request(llm: LLM, engine: AsyncLLM) -> None:
    async def run() -> None:
        task = asyncio.create_task(collect(engine, "a", PROMPTS[0], PARAMS))
        async for _ in engine.generate(PROMPTS[1], PARAMS, "b"):
            break
        await engine.pause_generation(mode="keep")
        before = llm.stats()["num_steps"]
        await asyncio.sleep(0.05)
        assert llm.stats()["num_steps"] == before
        await engine.resume_generation()
        assert len((await task)[-1].token_ids) == 12
        with pytest.raises(ValueError, match="the mode of pause_generation is 'abort'; it must be one of keep"):
            await engine.pause_generation()
        assert await engine.get_tokenizer() is llm.tokenizer

    asyncio.run(run())
    assert llm.generate(PROMPTS[0], PARAMS, use_tqdm=False)[0].finish_reason == "length", "nothing is left over"


def test_an_aborted_request_ends_with_its_tokens_so_far_and_the_others_go_on(llm: LLM, engine: AsyncLLM) -> None:
    async def run() -> list[list[Any]]:
        tasks = [asyncio.create_task(collect(engine, str(i), p, PARAMS)) for i, p in enumerate(PROMPTS)]
        async for output in engine.generate(PROMPTS[0], PARAMS, "first"):
            if output.finished:
                break
            if len(output.token_ids) == 3:
                await engine.abort(["0", "first", "nobody"])
        assert output.finish_reason == "abort" and 3 <= len(output.token_ids) < 12
        await engine.abort("3")
        return await asyncio.gather(*tasks)

    expected = llm.generate(list(PROMPTS), PARAMS, use_tqdm=False)
    found = [outputs[-1] for outputs in asyncio.run(run())]
    assert [output.finish_reason for output in found] == ["abort", "length", "length", "abort"]
    for output, whole in zip(found, expected, strict=True):
        assert output.finished and output.token_ids == whole.token_ids[: len(output.token_ids)]
        assert whole.text.startswith(output.text)
    assert llm.is_finished()


def test_an_abort_counts_from_the_call_of_generate(llm: LLM, engine: AsyncLLM) -> None:
    """It comes after so many turns of the loop, while the engine's thread is busy with others, and while it is not."""

    async def run(num_turns: int, others: list[str]) -> Any:
        tasks = [asyncio.create_task(collect(engine, name, PROMPTS[0], PARAMS)) for name in others]
        tasks.append(asyncio.create_task(collect(engine, "x", PROMPTS[0], LONG)))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await engine.abort("x")
        return [outputs[-1] for outputs in await asyncio.wait_for(asyncio.gather(*tasks), 60)]

    for others in ([], ["y", "z"]):
        for num_turns in (0, 1, 2, 3, 10, 50):
            *ended, output = asyncio.run(run(num_turns, others))
            assert output.finished and output.finish_reason == "abort" and len(output.token_ids) < 60
            assert {one.finish_reason for one in ended} <= {"length"}
            assert llm.is_finished()


def test_an_abort_counts_before_the_first_output_is_asked_for(llm: LLM, engine: AsyncLLM) -> None:
    async def run() -> list[Any]:
        iterators = [engine.generate(PROMPTS[0], LONG, name) for name in ("x", "y", "dropped")]
        await engine.abort("x")
        del iterators[2]
        return [[output async for output in iterator][-1] for iterator in iterators]

    aborted, ended = asyncio.run(run())
    assert aborted.finished and (aborted.finish_reason, len(aborted.token_ids)) == ("abort", 0)
    assert len(ended.token_ids) == 60
    assert llm.is_finished() and not list(engine._calls)


def test_an_abort_ends_a_request_in_a_pause_without_a_step(llm: LLM, engine: AsyncLLM) -> None:
    async def run() -> None:
        early = asyncio.create_task(collect(engine, "early", PROMPTS[0], LONG))
        while not llm.engine.scheduler.running:
            await asyncio.sleep(0.001)
        await engine.pause_generation(mode="keep")
        before = llm.stats()["num_steps"]
        late = asyncio.create_task(collect(engine, "late", PROMPTS[1], PARAMS))
        kept = asyncio.create_task(collect(engine, "kept", PROMPTS[2], PARAMS))
        await asyncio.sleep(0.01)
        await engine.abort(["late", "early"])
        for task in (early, late):
            outputs = await asyncio.wait_for(task, 60)
            assert outputs[-1].finish_reason == "abort" and len(outputs[-1].token_ids) < 60
        assert llm.stats()["num_steps"] == before and not kept.done()
        await engine.resume_generation()
        assert len((await kept)[-1].token_ids) == 12

    asyncio.run(run())


def test_an_engine_tells_whether_it_sleeps(engine: AsyncLLM) -> None:
    async def run() -> list[bool]:
        told = [await engine.is_sleeping()]
        await engine.sleep(level=1, mode="abort")
        told.append(await engine.is_sleeping())
        await engine.wake_up(tags=["weights", "kv_cache"])
        return [*told, await engine.is_sleeping(), bool(await collect(engine, "x", PROMPTS[0], PARAMS))]

    assert asyncio.run(run()) == [False, True, False, True]


def test_after_shutdown_there_is_one_error_for_all() -> None:
    engine = AsyncLLM(LLM(BOX_MODEL, **OPTIONS))

    async def run() -> list[Any]:
        tasks = [asyncio.create_task(collect(engine, str(i), prompt, LONG)) for i, prompt in enumerate(PROMPTS)]
        await asyncio.sleep(0.01)
        await engine.pause_generation(mode="keep")  # some wait for the pause to end, and others for the thread
        engine.shutdown()
        calls: list[Any] = [engine.abort("0"), engine.pause_generation(mode="keep"), engine.resume_generation()]
        calls += [
            engine.sleep(),
            engine.wake_up(),
            engine.is_sleeping(),
            engine.get_tokenizer(),
            collect(engine, "x", "a", PARAMS),
        ]
        return await asyncio.wait_for(asyncio.gather(*tasks, *calls, return_exceptions=True), 60)

    errors = asyncio.run(run())
    assert {(type(error), str(error)) for error in errors} == {(ClosedError, "the engine is closed")}


def test_what_cannot_be_streamed_is_refused(engine: AsyncLLM) -> None:
    for params, prompt, error in (
        (SamplingParams(n=2), "a", "a stream gives the text of one completion: n must be 1"),
        (SamplingParams(), [10**9], "token id"),
    ):
        with pytest.raises(ValueError, match=error):
            asyncio.run(collect(engine, "x", prompt, params))  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="AsyncLLM has no attribute 'beam_search': generate"):
        engine.beam_search  # noqa: B018


def test_the_error_of_a_step_reaches_every_task() -> None:
    class Failing:
        def planned(self, *_: Any) -> None: ...
        def close(self) -> None: ...
        def finished(self, number: int, *_: Any) -> None:
            if number == 3:
                raise OSError("the disk is full")

    async def run(engine: AsyncLLM) -> list[Any]:
        tasks = (collect(engine, str(i), prompt, PARAMS) for i, prompt in enumerate(PROMPTS[:2]))
        return await asyncio.gather(*tasks, return_exceptions=True)

    engine = AsyncLLM(LLM(BOX_MODEL, **OPTIONS))
    engine._llm.observe(Failing())  # type: ignore[arg-type]
    errors = asyncio.run(run(engine))
    engine.shutdown()
    assert {type(error) for error in errors} == {OSError, RuntimeError}
    with pytest.raises(RuntimeError, match="the engine is closed"):
        asyncio.run(collect(engine, "x", "a", PARAMS))
