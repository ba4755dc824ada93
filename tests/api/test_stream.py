"""Streams, interruption and the life of an engine: however a run ends, the engine is whole afterwards or closed."""

import copy
import gc
import itertools
import logging
import os
import pickle
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.integrity import check_scheduler
from helpers.tiny import SMALL, draw_prompts, make_tokenizer, save_random

from nanovllm import LLM, SamplingParams

OPTIONS = SMALL | {"max_model_len": 96, "max_num_seqs": 4, "num_kvcache_blocks": 64}
PROMPTS = draw_prompts([20, 33, 5, 48, 17, 64])


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count)


@pytest.fixture(params=[1, 2], ids=["depth 1", "depth 2"])
def llm(request: pytest.FixtureRequest, random_model: Path) -> Iterator[LLM]:
    with LLM(random_model, **OPTIONS) as llm:
        llm.engine.depth = request.param
        yield llm


def generate(llm: LLM) -> list[list[int]]:
    return [o["token_ids"] for o in llm.generate(PROMPTS, greedy(12), use_tqdm=False)]


def assert_idle(llm: LLM) -> None:
    """Nothing is left of any request, in the counts and inside."""
    stats = llm.stats()
    assert stats["num_free_blocks"] == stats["num_blocks"]
    assert not llm.engine.has_work
    check_scheduler(llm.engine.scheduler)


def assert_whole(llm: LLM, expected: list[list[int]]) -> None:
    assert_idle(llm)
    assert generate(llm) == expected
    assert_idle(llm)


def on_step(llm: LLM, number: int, act: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call act inside the launch of the number-th step from now, before the model runs."""
    launch = llm.engine.runner.launch
    steps = itertools.count(1)

    def launch_and_act(*step: Any) -> Any:
        if next(steps) == number:
            act()
        return launch(*step)

    monkeypatch.setattr(llm.engine.runner, "launch", launch_and_act)


# ---- streams


def test_a_stream_yields_each_output_as_it_finishes_with_its_number(llm: LLM) -> None:
    counts = [9, 3, 12, 1, 5, 2]
    expected = [
        llm.generate(p, greedy(n), use_tqdm=False)[0]["token_ids"] for p, n in zip(PROMPTS, counts, strict=True)
    ]
    seen = [(i, o["token_ids"]) for i, o in llm.stream(zip(PROMPTS, map(greedy, counts), strict=True))]
    assert [expected[i] for i, _ in seen] == [token_ids for _, token_ids in seen]
    order = [i for i, _ in seen]
    assert sorted(order) == list(range(6))
    assert [i for i in order if i < 4] == [3, 1, 0, 2], "the first four start together"
    assert_idle(llm)


class Endless:
    """Not itself an iterator."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return self._items


@pytest.mark.parametrize("kind", [iter, Endless], ids=["iterator", "iterable"])
def test_an_endless_iterable_is_pulled_no_further_than_needed(kind: Any, llm: LLM) -> None:
    """4 running, at most 2 x 4 waiting and 2 x 4 that are tokenised, beyond those yielded (and ended in one step)."""
    pulled = 0

    def endless() -> Iterator[tuple[list[int], SamplingParams]]:
        nonlocal pulled
        while pulled < 9999:
            pulled += 1
            yield [pulled % 500, 7], greedy(1 + pulled % 3)

    stream = llm.stream(kind(endless()))
    assert pulled == 0
    for yielded, _ in enumerate(itertools.islice(stream, 100), start=1):
        assert pulled <= yielded + 4 + 4 + 2 * 4 + 2 * 4 + 1
    stream.close()  # type: ignore[attr-defined]
    assert_idle(llm)


A, B = map(make_tokenizer().token_to_id, "ab")


@pytest.mark.parametrize(
    "form",
    [
        ["ab"],
        "ab",
        {"prompt": "ab"},
        [{"prompt": "ab"}],
        [[A, B]],
        [A, B],
        (A, B),
        [(A, B)],
        np.array([A, B]),
        torch.tensor([[A, B]]),
        [{"prompt_token_ids": [A, B]}],
        iter(["ab"]),
        [("ab", None)],
        [([A, B], SamplingParams(temperature=0, max_tokens=3))],
    ],
    ids=[str(i) for i in range(14)],
)
def test_a_stream_takes_a_prompt_in_every_form_bare_or_with_its_params(form: Any, reciter: Path) -> None:
    with LLM(reciter, **OPTIONS) as llm:
        ((index, output),) = llm.stream(form, greedy(3))
    assert (index, output.text, output.prompt_token_ids) == (0, "cde", [A, B])


def test_a_bad_prompt_of_a_stream_is_named(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"prompt 2: .*9999"):
        list(llm.stream([[1], [2], [9999]], greedy(2)))
    with pytest.raises(ValueError, match="prompts is 5"):
        list(llm.stream(5))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"max_tokens": 13},  # ends with half of a character
        {"stop": "wxy"},
        {"stop": ["xyz", "q!"]},
        {"stop": "never"},
        {"stop_token_ids": [256 + 1]},
        {"ignore_eos": True, "max_tokens": 60, "skip_special_tokens": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("depth", [1, 2])
def test_the_pieces_of_stream_tokens_are_the_text(params: dict[str, Any], depth: int, reciter: Path) -> None:
    with LLM(reciter, **OPTIONS) as llm:
        llm.engine.depth = depth
        sampling = SamplingParams(temperature=0, max_tokens=64).clone()
        for name, value in params.items():
            setattr(sampling, name, value)
        (output,) = llm.generate("a", sampling, use_tqdm=False)
        pieces = list(llm.stream_tokens("a", sampling))
        assert "".join(pieces) == output.text
        assert len(pieces) > 8, "they come as tokens do"
        assert not any("\ufffd" in piece for piece in pieces[:-1])
        next(left := llm.stream_tokens("a", sampling))
        left.close()  # type: ignore[attr-defined]
        assert_idle(llm)


@pytest.mark.parametrize("stop", ["bcdefgh", ["cdefghi", "never comes"]], ids=str)
def test_no_piece_is_the_beginning_of_a_stop_string_that_ends_the_text(stop: Any, reciter: Path) -> None:
    with LLM(reciter, **OPTIONS) as llm:
        params = SamplingParams(temperature=0, max_tokens=64, stop=stop)
        (output,) = llm.generate("a", params, use_tqdm=False)
        assert "".join(llm.stream_tokens("a", params)) == output.text


def test_a_stream_decodes_each_token_a_few_times(reciter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(reciter, **OPTIONS | {"max_model_len": 400}) as llm:
        backend = llm.engine.tokenizer._backend  # type: ignore[union-attr]
        num_decoded = 0

        class Counter:
            def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
                nonlocal num_decoded
                num_decoded += len(token_ids)
                return backend.decode(token_ids, skip_special_tokens)  # type: ignore[no-any-return]

        monkeypatch.setattr(llm.engine.tokenizer, "_backend", Counter())
        params = SamplingParams(temperature=0, max_tokens=390, ignore_eos=True, skip_special_tokens=False)
        assert sum(map(len, llm.stream_tokens([A, B], params))) > 300
    assert num_decoded < 10 * 390, "if each step decoded the whole output, there would be 33,000"


def test_stream_tokens_needs_a_tokenizer_and_a_good_prompt(llm: LLM, reciter: Path) -> None:
    with pytest.raises(ValueError, match="no tokenizer"):
        list(llm.stream_tokens([1]))
    with LLM(reciter, **OPTIONS) as speaking, pytest.raises(ValueError, match="empty"):
        list(speaking.stream_tokens(""))


# ---- nano-vLLM's loop


def test_the_loop_of_nano_vllm_ends_requests_as_generate_does(llm: LLM) -> None:
    counts = [9, 3, 12, 1, 5, 2]
    expected = [
        llm.generate(p, greedy(n), use_tqdm=False)[0]["token_ids"] for p, n in zip(PROMPTS, counts, strict=True)
    ]
    with LLM(llm.engine.config.model, **OPTIONS, enable_prefix_caching=False) as loop:
        loop.engine.depth = llm.engine.depth
        numbers = [loop.add_request(p, greedy(n)) for p, n in zip(PROMPTS, counts, strict=True)]
        found = {}
        num_prefill = 0
        num_decode = 0
        while not loop.is_finished():
            ended, num_tokens = loop.step()
            found.update(dict(ended))
            num_prefill += max(num_tokens, 0)
            num_decode += max(-num_tokens, 0)
        assert [found[number] for number in numbers] == expected
        computed = sum(map(len, PROMPTS)) + sum(counts) - len(counts)
        useless = num_prefill + num_decode - computed  # rows of those that ended one step before, at depth 2
        assert 0 <= useless <= (loop.engine.depth - 1) * len(counts)
        assert num_prefill >= sum(map(len, PROMPTS))
        assert num_decode > 0
        assert loop.step() == ([], 0)
        loop.add_request([1], greedy(2))
        counts = [loop.step()[1] for _ in range(3)]
        assert [count for count in counts if count] == [1, -1], "a prompt of one token is no decode"
        assert_idle(loop)


def test_the_loop_and_a_run_do_not_mix(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.add_request(PROMPTS[0], greedy(2))
    for call in (lambda: llm.generate(PROMPTS), lambda: llm.score(PROMPTS, PROMPTS), lambda: next(llm.stream(PROMPTS))):
        with pytest.raises(RuntimeError, match=r"add_request.*step"):
            call()
    assert capsys.readouterr().err == "", "no bar is drawn of what is refused"
    while not llm.is_finished():
        llm.step()
    stream = llm.stream([(PROMPTS[0], greedy(2))] * 9)
    next(stream)
    for call in (lambda: llm.add_request(PROMPTS[0]), llm.step):
        with pytest.raises(RuntimeError, match="open"):
            call()
    stream.close()  # type: ignore[attr-defined]
    llm.exit()
    with pytest.raises(RuntimeError, match="closed"):
        llm.add_request(PROMPTS[0])


# ---- where an engine cannot go


@pytest.mark.parametrize("copy_it", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda f: f.__name__)
def test_an_engine_cannot_be_copied_and_says_so(copy_it: Callable[[Any], object], llm: LLM) -> None:
    with pytest.raises(TypeError, match=r"an LLM cannot be pickled or copied.*make one"):
        copy_it(llm)


def test_a_forked_process_is_told_to_make_its_own_engine(llm: LLM) -> None:
    expected = generate(llm)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for call in (lambda: generate(llm), lambda: list(llm.stream([PROMPTS[0]])), llm.step):
                try:
                    call()
                except RuntimeError as error:
                    os.write(writing, f"{error}\n".encode())
            llm.close()
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        messages = told.read().splitlines()
    os.waitpid(child, 0)
    assert len(messages) == 3
    assert all("forked" in message for message in messages)
    assert_whole(llm, expected)


def test_prompts_of_a_stream_are_tokenised_while_steps_run(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another thread than the iterable's, and before the engine wants them."""
    threads = set()
    prepare = llm.engine.prepare

    def prepare_and_note(*args: Any) -> Any:
        threads.add(threading.current_thread())
        return prepare(*args)

    def requests() -> Iterator[list[int]]:
        for prompt in PROMPTS:
            assert threading.current_thread() is threading.main_thread()
            yield prompt

    monkeypatch.setattr(llm.engine, "prepare", prepare_and_note)
    assert len(list(llm.stream(requests(), greedy(2)))) == len(PROMPTS)
    assert threading.main_thread() not in threads
    assert not any(thread.is_alive() for thread in threads)


def test_a_stream_of_nothing_ends(llm: LLM) -> None:
    assert list(llm.stream([])) == []


def test_a_stream_takes_requests_that_were_prepared(llm: LLM) -> None:
    """So that a caller can set a bad one aside."""
    good = []
    bad = []
    for prompt in (PROMPTS[0], [], PROMPTS[1], [10**6], [1] * 96):
        try:
            good.append(llm.prepare(prompt, greedy(4)))
        except ValueError as error:
            bad.append(str(error))
    assert len(bad) == 3
    outputs = dict(llm.stream([good[0], (PROMPTS[2], greedy(4)), good[1]]))
    assert [outputs[i]["prompt_token_ids"] for i in range(3)] == [PROMPTS[0], PROMPTS[2], PROMPTS[1]]


@pytest.mark.parametrize("bad", [([], greedy(3)), ([9999], greedy(3)), (PROMPTS[0], "hot")], ids=str)
def test_a_bad_request_ends_a_stream_and_leaves_the_engine_whole(bad: Any, llm: LLM) -> None:
    expected = generate(llm)
    with pytest.raises(ValueError):
        list(llm.stream([(PROMPTS[0], greedy(20)), bad]))
    assert_whole(llm, expected)


def test_an_iterable_that_raises_ends_a_stream_and_leaves_the_engine_whole(llm: LLM) -> None:
    expected = generate(llm)

    def requests() -> Iterator[tuple[list[int], SamplingParams]]:
        for prompt in PROMPTS * 3:
            yield prompt, greedy(3)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        list(llm.stream(requests()))
    assert_whole(llm, expected)


@pytest.mark.parametrize("leave", ["break", "close", "raise"])
def test_leaving_a_stream_early_aborts_what_is_running(leave: str, llm: LLM) -> None:
    expected = generate(llm)
    requests = [(prompt, greedy(3 + 9 * i)) for i, prompt in enumerate(PROMPTS)]
    if leave == "break":
        for _ in llm.stream(requests):
            break
    elif leave == "close":
        stream = llm.stream(requests)
        next(stream)
        assert llm.stats()["num_free_blocks"] < llm.stats()["num_blocks"]
        stream.close()  # type: ignore[attr-defined]
    else:
        with pytest.raises(KeyError):
            for _ in llm.stream(requests):
                raise KeyError
    assert_whole(llm, expected)


def test_a_second_run_while_a_stream_is_open_is_refused_and_does_not_disturb_it(llm: LLM) -> None:
    expected = generate(llm)
    stream = llm.stream((prompt, greedy(12)) for prompt in PROMPTS)
    outputs = dict([next(stream)])
    with pytest.raises(RuntimeError, match="open"):
        generate(llm)
    with pytest.raises(RuntimeError, match="open"):
        next(llm.stream([(PROMPTS[0], greedy(1))]))
    outputs.update(stream)
    assert [outputs[i]["token_ids"] for i in range(len(PROMPTS))] == expected
    assert_whole(llm, expected)


def test_a_stream_that_was_never_started_holds_nothing(llm: LLM) -> None:
    stream = llm.stream([(PROMPTS[0], greedy(2))])
    expected = generate(llm)
    assert len(list(stream)) == 1
    assert_whole(llm, expected)


# ---- errors in the middle


@pytest.mark.parametrize("where", ["launch", "result"])
@pytest.mark.parametrize("step", [1, 2, 5])
def test_a_generate_that_raises_half_way_leaves_the_engine_whole_and_its_cache_forgotten(
    where: str, step: int, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows what the failed step wrote, so nothing that was cached may be found again."""
    expected = generate(llm)

    def fail(*_: object) -> None:
        raise ArithmeticError("the model failed")

    with monkeypatch.context() as patch:
        if where == "launch":
            on_step(llm, step, fail, patch)
        else:
            on_step(llm, step, lambda: patch.setattr("nanovllm.runner.model_runner.StepHandle.result", fail), patch)
        with pytest.raises(ArithmeticError, match="the model failed"):
            generate(llm)
    assert_idle(llm)
    outputs = llm.generate(PROMPTS, greedy(12), use_tqdm=False)
    assert [o["num_cached_tokens"] for o in outputs] == [0] * len(PROMPTS)
    assert [o["token_ids"] for o in outputs] == expected


def test_when_nothing_can_run_after_a_failure_the_engine_closes_and_says_why(
    random_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    llm = LLM(random_model, **OPTIONS)

    def fail() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    on_step(llm, 2, fail, monkeypatch)
    monkeypatch.setattr(llm.engine.runner, "reason_to_close", lambda: "the device is lost")
    with caplog.at_level(logging.ERROR), pytest.raises(RuntimeError, match="illegal memory access"):
        generate(llm)
    assert "closed: the device is lost" in caplog.text
    with pytest.raises(RuntimeError, match="closed"):
        generate(llm)


# ---- Ctrl-C


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("step", [1, 3])
def test_ctrl_c_waits_for_the_step_in_hand_and_leaves_the_engine_whole(
    step: int, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate(llm)
    before = llm.stats()["num_steps"]
    with monkeypatch.context() as patch:
        on_step(llm, step, interrupt, patch)
        with pytest.raises(KeyboardInterrupt):
            generate(llm)
    assert llm.stats()["num_steps"] == before + step, "the step was cut short, or another begun"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_whole(llm, expected)


@pytest.mark.parametrize("moment", ["prepare", "add", "make_output", "scheduler.schedule", "scheduler.update"])
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_ctrl_c_at_any_moment_leaves_the_engine_whole(
    moment: str, late: bool, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between steps it does not wait; within one, also where sequences are half moved, it does."""
    expected = generate(llm)
    owner = llm.engine.scheduler if "." in moment else llm.engine
    name = moment.split(".")[-1]
    act = getattr(owner, name)
    calls = itertools.count(1)

    def act_and_interrupt(*args: Any) -> Any:
        now = next(calls) == 3
        if now and not late:
            interrupt()
        result = act(*args)
        if now and late:
            interrupt()
        return result

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, act_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            generate(llm)
    assert_whole(llm, expected)


def test_ctrl_c_in_a_stream_leaves_the_engine_whole(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = generate(llm)
    with monkeypatch.context() as patch:
        on_step(llm, 4, interrupt, patch)
        with pytest.raises(KeyboardInterrupt):
            list(llm.stream((prompt, greedy(12)) for prompt in PROMPTS))
    assert_whole(llm, expected)


def test_what_ends_in_the_step_that_ctrl_c_meets_is_not_lost(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [4, 9, 4]
    found = {}
    on_step(llm, 3 + llm.engine.depth, interrupt, monkeypatch)  # when step 4 is read, and 5 perhaps launched
    with pytest.raises(KeyboardInterrupt):
        for i, output in llm.stream(([5 + i], greedy(n)) for i, n in enumerate(lengths)):
            found[i] = len(output["token_ids"])
    assert found == {0: 4, 2: 4}


def test_a_second_ctrl_c_does_not_wait_and_closes_the_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice() -> None:
        interrupt()
        interrupt()
        pytest.fail("the second one waited")

    on_step(llm, 2, twice, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        generate(llm)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(RuntimeError, match="closed"):
        generate(llm)


def test_a_second_ctrl_c_while_the_first_cleans_up_waits_for_that(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = generate(llm)
    scheduler = llm.engine.scheduler
    release = scheduler.block_manager.release
    with monkeypatch.context() as patch:
        on_step(llm, 2, interrupt, patch)
        patch.setattr(scheduler.block_manager, "release", lambda blocks: (interrupt(), release(blocks)))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS[:1], greedy(12), use_tqdm=False)
    assert_whole(llm, expected)


def test_the_users_own_handler_of_ctrl_c_stays_his(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    received = []
    before = signal.signal(signal.SIGINT, lambda *_: received.append(1))
    try:
        expected = generate(llm)
        on_step(llm, 2, interrupt, monkeypatch)
        assert generate(llm) == expected
        assert received == [1]
    finally:
        signal.signal(signal.SIGINT, before)


def test_generate_runs_in_another_thread(llm: LLM) -> None:
    expected = generate(llm)
    outputs = []
    thread = threading.Thread(target=lambda: outputs.append(generate(llm)))
    thread.start()
    thread.join()
    assert outputs == [expected]


# ---- the life of an engine


def test_two_engines_run_side_by_side_and_one_after_another(random_model: Path, tmp_path: Path) -> None:
    """Two models, their streams read in turns, one engine closed while the other runs."""
    save_random(tmp_path, seed=5)
    expected = []
    for folder in (random_model, tmp_path):
        with LLM(folder, **OPTIONS) as llm:
            expected.append(generate(llm))
    assert expected[0] != expected[1]

    a = LLM(random_model, **OPTIONS)
    b = LLM(tmp_path, **OPTIONS)
    streams = [llm.stream((prompt, greedy(12)) for prompt in PROMPTS) for llm in (a, b)]
    outputs: list[dict[int, Any]] = [{}, {}]
    for pair in zip(*streams, strict=True):
        for seen, (i, output) in zip(outputs, pair, strict=True):
            seen[i] = output["token_ids"]
    assert [[seen[i] for i in range(len(PROMPTS))] for seen in outputs] == expected
    a.close()
    assert_whole(b, expected[1])


def test_an_engine_closed_by_what_feeds_its_stream_says_so(random_model: Path) -> None:
    llm = LLM(random_model, **OPTIONS)

    def prompts() -> Iterator[list[int]]:
        yield PROMPTS[0]
        llm.close()
        yield PROMPTS[1]

    with pytest.raises(RuntimeError, match="the engine is closed"):
        list(llm.stream(prompts(), greedy(4)))


def test_a_request_runs_on_the_engine_that_prepared_it_alone(random_model: Path) -> None:
    with LLM(random_model, **OPTIONS) as one, LLM(random_model, **OPTIONS) as other:
        request = one.prepare(PROMPTS[0], greedy(4))
        with pytest.raises(ValueError, match="prepared by another engine"):
            list(other.stream([request]))
        assert len(list(one.stream([request]))) == 1


def test_close_frees_the_model_and_the_cache_and_may_be_repeated(random_model: Path) -> None:
    llm = LLM(random_model, **OPTIONS)
    generate(llm)
    model = weakref.ref(llm.engine.runner.model)
    cache = weakref.ref(llm.engine.runner.caches[0][0])
    llm.close()
    llm.close()
    gc.collect()
    assert model() is None
    assert cache() is None


def test_a_closed_engine_refuses_to_run(random_model: Path) -> None:
    with LLM(random_model, **OPTIONS) as llm:
        generate(llm)
    calls: list[Callable[[], object]] = [
        lambda: llm.generate([[1]], greedy(1)),
        lambda: next(llm.stream([([1], greedy(1))])),
        lambda: llm.generate([], greedy(1)),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="closed"):
            call()
    assert llm.stats()["num_free_blocks"] == llm.stats()["num_blocks"]


def test_leaving_the_context_by_an_error_closes_too(random_model: Path) -> None:
    with pytest.raises(KeyError), LLM(random_model, **OPTIONS) as llm:
        raise KeyError
    with pytest.raises(RuntimeError, match="closed"):
        generate(llm)


def test_closing_while_a_stream_is_open_ends_the_stream(llm: LLM) -> None:
    stream = llm.stream((prompt, greedy(9 + i)) for i, prompt in enumerate(PROMPTS))
    next(stream)
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        list(stream)


def test_stats_is_one_flat_dict_of_cumulative_counts(llm: LLM) -> None:
    names = ["num_steps", "num_prompt_tokens", "num_cached_tokens", "num_generated_tokens", "num_preemptions"]
    names += ["num_draft_tokens", "num_accepted_tokens", "num_free_blocks", "num_blocks"]
    assert llm.stats() == dict.fromkeys(names, 0) | {"num_free_blocks": 64, "num_blocks": 64}
    assert list(llm.stats()) == names
    generate(llm)
    first = llm.stats()
    assert first["num_prompt_tokens"] == sum(map(len, PROMPTS))
    assert first["num_generated_tokens"] == 12 * len(PROMPTS)
    assert first["num_steps"] >= 24
    generate(llm)
    assert llm.stats()["num_generated_tokens"] == 2 * first["num_generated_tokens"]


def test_a_held_ctrl_c_is_not_lost_on_who_stops_listening(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = generate(llm)
    with monkeypatch.context() as patch:
        on_step(llm, 3 + llm.engine.depth, interrupt, patch)
        requests = [([5 + i], greedy(n)) for i, n in enumerate((4, 4, 9))]
        with pytest.raises(KeyboardInterrupt), closing(llm.stream(requests)) as stream:
            next(stream)
    assert_whole(llm, expected)


def test_ctrl_c_in_a_step_that_fails_is_a_ctrl_c(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = generate(llm)

    def interrupt_and_fail() -> None:
        interrupt()
        raise RuntimeError("a step failed")

    with monkeypatch.context() as patch:
        on_step(llm, 2, interrupt_and_fail, patch)
        with pytest.raises(KeyboardInterrupt) as caught:
            generate(llm)
    assert "a step failed" in str(caught.value.__cause__)
    assert_whole(llm, expected)
