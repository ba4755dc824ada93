"""An engine belongs to one activity at a time: whatever threads, signals and forks do, results are right or refused.

Races run for 0.7 seconds, or 6 in the slow one, and with a switch interval at which threads change places in the
middle of nearly everything. What could crash the process runs in one of its own: see `run_apart`.
"""

import atexit
import gc
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.paths import BOX_MODEL, TESTS
from helpers.tiny import SMALL, draw_prompts, save_random
from safetensors.torch import load_file

from nanovllm import LLM, SamplingParams
from nanovllm.engine.claim import REFUSALS, State
from nanovllm.engine.llm_engine import OPEN_RUN
from nanovllm.features.sharing import ACTIVITY
from nanovllm.outputs import Output
from nanovllm.utils import forks

OPTIONS: dict[str, Any] = SMALL | {
    "device": "cpu",
    "attention_backend": "cpu",
    "num_kvcache_blocks": 40,
    "max_num_seqs": 4,
}
PROMPTS = draw_prompts([3, 20, 40, 70])
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
TOLD = [
    " ".join(OPEN_RUN),
    " ".join(ACTIVITY),
    *(REFUSALS[one] for one in (State.UNFINISHED, State.LOADING, State.ASLEEP)),
]
REFUSED = re.compile("|".join([r"^[a-z_]+\(\) is running in this engine", *map(re.escape, TOLD)]))
"""An activity may be told this while another one has the engine."""
SECONDS = 0.7


@pytest.fixture(autouse=True)
def time_limit() -> Iterator[None]:
    """A test that hangs fails after two minutes."""

    def give_up(*_: Any) -> None:
        raise TimeoutError("the test hangs")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(params=[None, 1e-6], ids=["default", "1e-6"])
def switch_interval(request: pytest.FixtureRequest) -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(request.param or before)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints of the same shape."""
    folders = [tmp_path_factory.mktemp(f"weights-{seed}") for seed in (0, 1)]
    for seed, folder in enumerate(folders):
        save_random(folder, seed=seed)
    return folders


@pytest.fixture
def llm(folders: list[Path]) -> Iterator[LLM]:
    with LLM(folders[0], **OPTIONS) as llm:
        yield llm


def say(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(PROMPTS, params, use_tqdm=False)]


class Storm:
    """Threads that do things with one engine until the time is over, and what they met."""

    def __init__(self, llm: LLM, folders: list[Path]) -> None:
        self.llm = llm
        self.weights = [list(load_file(folder / "model.safetensors").items()) for folder in folders]
        self.answers = []
        """The oracle: for each weights the tokens of every prompt, computed alone."""
        for weights in self.weights:
            llm.load_weights(weights)
            self.answers.append(say(llm))
        assert self.answers[0] != self.answers[1]
        self.done: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.wrong: list[Any] = []

    def run(self, seconds: float, *threads: list[Callable[[random.Random], None]]) -> None:
        """Have each thread draw among its actions. Afterwards the engine must answer as one that nobody disturbed.

        When the time is over, a thread goes on with what it has not done yet. Threads that have done everything stop,
        so the last one has the engine to itself: however slow the machine is, every action is done at least once.
        """
        until = time.monotonic() + seconds

        def act(number: int, actions: list[Callable[[random.Random], None]]) -> None:
            draw = random.Random(number)
            while choice := actions if time.monotonic() < until else self.list_missing(actions):
                action = draw.choice(choice)
                name = action.__name__
                try:
                    action(draw)
                    self.done[name] += 1
                except Exception as error:
                    if isinstance(error, RuntimeError) and REFUSED.search(str(error)):
                        self.refused[name] += 1
                    else:
                        self.wrong.append((name, repr(error)[:300]))
                time.sleep(draw.choice([0, 0.001, 0.01]))

        running = [threading.Thread(target=act, args=pair, daemon=True) for pair in enumerate(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(seconds + 60)
        assert not any(thread.is_alive() for thread in running), "a future never ended"
        assert not self.wrong, (len(self.wrong), self.wrong[:3])
        for actions in threads:
            assert not self.list_missing(actions), (self.done, self.refused)
        self.llm.load_weights(self.weights[0])
        assert say(self.llm) == self.answers[0]
        assert self.llm.engine.scheduler.block_manager.num_used == 0

    def list_missing(self, actions: list[Callable[[random.Random], None]]) -> list[Callable[[random.Random], None]]:
        return [action for action in actions if not self.done[action.__name__]]

    def compare(self, tokens: list[list[int]], choice: slice) -> None:
        if tokens not in [answers[choice] for answers in self.answers]:
            self.wrong.append(("tokens", tokens))

    def submit(self, draw: random.Random) -> None:
        i = draw.randrange(len(PROMPTS))
        future = self.llm.submit(PROMPTS[i], GREEDY)
        if draw.random() < 0.2 and future.cancel():
            return
        self.compare([future.result(timeout=60)["token_ids"]], slice(i, i + 1))

    def load(self, draw: random.Random) -> None:
        self.llm.load_weights(draw.choice(self.weights))

    def sleep(self, _: random.Random) -> None:
        self.llm.sleep(1)
        while self.llm.engine.claim.state is not State.READY:
            self.llm.wake_up()

    def generate(self, _: random.Random) -> None:
        self.compare(say(self.llm), slice(None))

    def stream(self, _: random.Random) -> None:
        stream = self.llm.stream(PROMPTS, GREEDY)
        i, output = next(stream)
        self.compare([output["token_ids"]], slice(i, i + 1))

    def score(self, _: random.Random) -> None:
        self.llm.score(PROMPTS[:1], [[4, 5]], use_tqdm=False)

    def embed(self, _: random.Random) -> None:
        self.llm.embed(PROMPTS[:2], use_tqdm=False)

    def reset(self, _: random.Random) -> None:
        self.llm.reset_prefix_cache()

    def step(self, _: random.Random) -> None:
        """Once add_request() was not refused, step() is not refused until the request has ended.

        That holds in the only thread that calls them. Afterwards others may have the engine: is_finished() would tell
        of their requests, and step() would be refused.
        """
        number = self.llm.add_request(PROMPTS[1], GREEDY)
        ended = []
        try:
            while not ended:
                ended += self.llm.step()[0]
        except RuntimeError as error:
            self.wrong.append(("step", repr(error)))
        if [seq_id for seq_id, _ in ended] != [number]:
            self.wrong.append(("step", ended))
        self.compare([token_ids for _, token_ids in ended], slice(1, 2))


def test_new_weights_beside_submit(llm: LLM, folders: list[Path], switch_interval: None) -> None:
    storm = Storm(llm, folders)
    storm.run(SECONDS, [storm.submit], [storm.load])


def test_sleep_beside_submit(llm: LLM, folders: list[Path], switch_interval: None) -> None:
    storm = Storm(llm, folders)
    storm.run(SECONDS, [storm.submit], [storm.submit], [storm.sleep])


@pytest.mark.parametrize("seconds", [SECONDS, pytest.param(6, marks=pytest.mark.slow)])
def test_everything_beside_everything(seconds: float, llm: LLM, folders: list[Path], switch_interval: None) -> None:
    storm = Storm(llm, folders)
    runs = [storm.generate, storm.stream, storm.score, storm.embed]
    storm.run(seconds, [storm.submit], [storm.submit], runs, [storm.load, storm.sleep, storm.reset, storm.step])


# ---- processes of their own: what fails in them is a crash, or a hang


def run_apart(function: Callable[..., None], *arguments: Any, seconds: float = 100) -> str:
    """Run a function of this file in a process of its own, which must end with status 0. Return its output."""
    command = [sys.executable, __file__, function.__name__, *map(str, arguments)]
    paths = [str(TESTS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
    assert ended.returncode == 0, (ended.returncode, ended.stdout[-1000:], ended.stderr[-2000:])
    assert not ended.stderr, ended.stderr[-2000:]
    return ended.stdout


def close_at_random_moments(count: str, folder: str) -> None:
    """Close engines while requests of submit() run. Each future has a result or the reason, and memory is freed."""
    draw = random.Random(int(count))
    closed = 0
    for i in range(int(count)):
        llm = LLM(folder, **OPTIONS)
        model = weakref.ref(llm.engine.runner.model)
        futures = [llm.submit(prompt, LONG) for prompt in PROMPTS]
        time.sleep(draw.random() * 0.04 if i else 0)  # the first time at once: on a fast machine they end early
        llm.close()
        assert not hasattr(llm.engine.runner, "model"), "close() returns when the engine is freed"
        for future in futures:
            error = future.exception(timeout=60)
            assert error is None or str(error) == "the engine is closed", repr(error)
            closed += error is not None
        del llm
        if i % 10 == 0:
            gc.collect()
            assert model() is None
    assert closed, "no close came while requests ran"


@pytest.mark.slow
def test_closing_while_submitted_requests_run(folders: list[Path]) -> None:
    run_apart(close_at_random_moments, 30, folders[0])


def end_while_requests_run(backend: str, how: str) -> None:
    llm = LLM(BOX_MODEL, device="cpu", max_model_len=2048, attention_backend=backend)
    futures: list[Future[Output]] = []
    # What is registered first is called last: when the thread has ended.
    atexit.register(lambda: print(sum(future.done() and future.exception() is None for future in futures)))
    futures += [llm.submit("hello", SamplingParams(max_tokens=1500, ignore_eos=True)) for _ in range(20)]
    time.sleep(0.3)
    match how:
        case "del":
            del llm
        case "exit":
            sys.exit(0)
        case "fork":
            if os.fork():
                _, status = os.wait()
                assert status == 0, status
            else:
                sys.exit(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "how"), [("cpu", "fall"), ("cpu", "exit"), ("torch", "exit"), ("torch", "del"), ("cpu", "fork")]
)
def test_a_program_may_end_while_submitted_requests_run(backend: str, how: str) -> None:
    num_answers = run_apart(end_while_requests_run, backend, how).split()[-1]
    assert int(num_answers) < 20, "it waited for all requests"


def test_a_forked_process_is_refused_and_waits_for_no_lock(llm: LLM) -> None:
    """Forks at random moments, while other threads may hold any lock. Nobody would release it in the child."""
    draw = random.Random(0)
    calls: list[Callable[[], object]] = [
        lambda: llm.submit(PROMPTS[0], GREEDY),
        lambda: say(llm),
        lambda: llm.add_request(PROMPTS[0], GREEDY),
        llm.step,
        llm.sleep,
        llm.wake_up,
        llm.reset_prefix_cache,
        lambda: llm.load_weights([]),
    ]
    for _ in range(15):
        futures = [llm.submit(prompt, LONG) for prompt in PROMPTS]
        time.sleep(draw.random() * 0.01)
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            num_refused = 0
            for call in calls:
                try:
                    call()
                except RuntimeError as error:
                    num_refused += "forked" in str(error) and "spawn or subprocess" in str(error)
            llm.close()
            os._exit(num_refused)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == len(calls)
        assert all(len(future.result(timeout=60)["token_ids"]) == 40 for future in futures)


def make_and_ask(folder: str) -> str:
    """Make an engine. Return what it says, or why it was refused."""
    signal.alarm(60)
    try:
        with LLM(folder, **OPTIONS) as llm:
            return str(say(llm))
    except RuntimeError as error:
        return str(error)


def make_engines_in_forks(folder: str) -> None:
    """Make an engine in forked processes: before the parent computes anything, and afterwards."""
    from transformers import AutoConfig, AutoTokenizer  # noqa: F401  # the children need not import them

    torch.set_num_threads(2)
    os.environ["OMP_NUM_THREADS"] = "2"

    def fork(on_child: Any = signal.SIG_DFL) -> str:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, on_child)
            os.write(writing, make_and_ask(folder).encode())
            os._exit(0)
        os.close(writing)
        assert os.waitpid(child, 0)[1] == 0, "it hung or crashed"
        with open(reading, encoding="utf-8") as pipe:
            return pipe.read()

    before = fork(signal.SIG_IGN)
    torch.ones(1 << 20).exp_()
    forks.SECONDS = 1.0
    after = fork()
    assert "forked after torch had computed with several threads" in after and "spawn or subprocess" in after, after
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply_async(make_and_ask, [folder]).get(timeout=60) == after
    assert make_and_ask(folder) == before, "the children answered, and the parent is as it was"
    assert fork(signal.SIG_IGN) == after, "an engine is here now"


@pytest.mark.slow
def test_an_engine_in_a_forked_process_answers_or_is_refused_and_does_not_hang(folders: list[Path]) -> None:
    run_apart(make_engines_in_forks, folders[0])


# ---- closing


def test_closing_beside_a_suspended_stream_frees_at_once(llm: LLM) -> None:
    """In the thread that keeps the stream, and in another one: nobody would go on with the stream."""
    model = weakref.ref(llm.engine.runner.model)
    stream = llm.stream([(PROMPTS[0], GREEDY), (PROMPTS[1], LONG)])
    next(stream)
    with pytest.raises(RuntimeError, match="is open"):
        say(llm)
    with pytest.raises(RuntimeError, match="is open"):
        llm.submit(PROMPTS[0], GREEDY).result(timeout=60)
    thread = threading.Thread(target=llm.close)
    thread.start()
    thread.join(30)
    llm.close()
    gc.collect()
    assert model() is None
    with pytest.raises(RuntimeError, match="the engine is closed"):
        next(stream)
    with pytest.raises(RuntimeError, match="the engine is closed"):
        llm.submit(PROMPTS[0], GREEDY).result(timeout=60)


class Watch:
    """An observer that calls a function when step 3 is planned, so within a step."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call
        self.num_planned = 0

    def planned(self, *_: Any) -> None:
        self.num_planned += 1
        if self.num_planned == 3:
            self.call()

    def finished(self, *_: Any) -> None:
        pass

    def close(self) -> None:
        pass


def test_closing_within_a_step_frees_at_its_end(llm: LLM) -> None:
    seen = []

    def close() -> None:
        llm.close()
        seen.append(hasattr(llm.engine.runner, "model"))

    llm.observe(Watch(close))
    with pytest.raises(RuntimeError, match="the engine is closed"):
        say(llm)
    assert seen == [True]
    assert not hasattr(llm.engine.runner, "model")


def test_closing_in_another_thread_waits_for_the_step_in_hand(llm: LLM) -> None:
    closing = threading.Thread(target=llm.close)

    def close() -> None:
        closing.start()
        closing.join(0.3)
        assert closing.is_alive() and hasattr(llm.engine.runner, "model")

    llm.observe(Watch(close))
    with pytest.raises(RuntimeError, match="the engine is closed"):
        say(llm)
    closing.join(30)
    assert not closing.is_alive() and not hasattr(llm.engine.runner, "model")


# ---- interrupts


def test_a_second_ctrl_c_closes_the_engine(llm: LLM) -> None:
    def interrupt_twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    llm.observe(Watch(interrupt_twice))
    with pytest.raises(KeyboardInterrupt):
        say(llm)
    assert not hasattr(llm.engine.runner, "model")
    with pytest.raises(RuntimeError, match="the engine is closed"):
        llm.submit(PROMPTS[0], GREEDY).result(timeout=60)


def test_a_ctrl_c_at_any_line_gives_the_claim_back(llm: LLM) -> None:
    """The signal comes at the first line of the loop, at the second, and so on, of a run of two steps.

    In claim.py it comes at calls alone. Python looks for signals there, and a claim is given back without a call.
    """
    files = ("nanovllm/engine/llm_engine.py", "nanovllm/llm.py", "nanovllm/engine/claim.py")
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    num_seen = 0
    chosen = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal num_seen
        name = frame.f_code.co_filename
        if not name.endswith(files):
            return None
        if event == ("call" if name.endswith("claim.py") else "line"):
            num_seen += 1
            if num_seen == chosen:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return trace

    def run(traced: bool) -> list[int]:
        sys.settrace(trace if traced else None)
        try:
            return llm.generate([PROMPTS[0]], params, use_tqdm=False)[0]["token_ids"]
        finally:
            sys.settrace(None)

    expected = run(traced=True)
    num_lines = num_seen
    assert num_lines > 100
    for chosen in range(1, num_lines + 1):
        num_seen = 0
        with suppress(KeyboardInterrupt):
            run(traced=True)
        assert run(traced=False) == expected, chosen
        assert not llm.engine.has_work
        assert llm.engine.scheduler.block_manager.num_used == 0, chosen


def test_a_stream_that_is_collected_gives_the_claim_back(llm: LLM) -> None:
    expected = say(llm)
    stream = llm.stream(PROMPTS, GREEDY)
    next(stream)
    cycle = [stream]
    cycle.append(cycle)  # type: ignore[arg-type]
    del stream, cycle
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join(30)
    assert say(llm) == expected


# ---- what callers do in the engine's own thread, and while it loads or sleeps


def test_the_engine_is_free_when_the_last_result_is_there(llm: LLM, switch_interval: None) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    for _ in range(40):
        for use in (
            lambda: llm.generate(PROMPTS[:1], params, use_tqdm=False),
            lambda: llm.embed(PROMPTS[:1], use_tqdm=False),
            llm.reset_prefix_cache,
        ):
            futures = [llm.submit(prompt, params) for prompt in PROMPTS[:2]]
            assert all(future.result(timeout=60) for future in futures)
            use()


def test_a_callback_of_a_future_may_submit_and_is_refused_while_others_run(llm: LLM) -> None:
    (expected, *_) = say(llm)
    seen: list[Any] = []
    nested: Future[list[int]] = Future()

    def call(future: "Future[Output]") -> None:
        try:
            say(llm)
        except RuntimeError as error:
            seen.append(str(error))
        again = llm.submit(PROMPTS[0], GREEDY)
        again.add_done_callback(lambda future: nested.set_result(future.result()["token_ids"]))

    ready = threading.Event()
    llm.observe(Watch(ready.wait))
    longer = llm.submit(PROMPTS[1], LONG)
    future = llm.submit(PROMPTS[0], GREEDY)
    future.add_done_callback(call)
    ready.set()
    assert nested.result(timeout=60) == expected == future.result()["token_ids"]
    assert len(seen) == 1 and seen[0].startswith("submit() has requests in this engine")
    assert len(longer.result(timeout=60)["token_ids"]) == 40


def test_a_callback_of_the_last_future_may_use_the_engine(llm: LLM) -> None:
    expected = say(llm)
    nested: Future[list[list[int]]] = Future()
    llm.submit(PROMPTS[0], GREEDY).add_done_callback(lambda _: nested.set_result(say(llm)))
    assert nested.result(timeout=60) == expected


def test_a_callback_of_a_future_may_close_the_engine(llm: LLM) -> None:
    short = llm.submit(PROMPTS[0], GREEDY)
    short.add_done_callback(lambda _: llm.close())
    others = [llm.submit(prompt, LONG) for prompt in PROMPTS]
    assert not wait_for_futures([short, *others], timeout=60).not_done
    assert short.exception() is None
    assert {str(future.exception()) for future in others} == {"the engine is closed"}
    assert not hasattr(llm.engine.runner, "model")


def test_an_output_that_cannot_be_made_is_the_error_of_its_future(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(llm.engine, "make_output", lambda seq: 1 / 0)
        future = llm.submit(PROMPTS[0], GREEDY)
        with pytest.raises(ZeroDivisionError):
            future.result(timeout=60)
    assert say(llm)


def test_what_yields_new_weights_may_use_the_engine(llm: LLM, folders: list[Path]) -> None:
    storm = Storm(llm, folders)
    new, old = storm.answers

    def use_and_yield() -> Iterator[Any]:
        for name, tensor in storm.weights[0]:
            assert say(llm) == old
            assert llm.submit(PROMPTS[0], GREEDY).result(timeout=60)["token_ids"] == old[0]
            llm.reset_prefix_cache()
            yield name, tensor

    def close_and_yield() -> Iterator[Any]:
        llm.close()
        yield from storm.weights[0]

    llm.load_weights(use_and_yield())
    assert say(llm) == new
    with pytest.raises(RuntimeError, match="the engine is closed"):
        llm.load_weights(close_and_yield())


def test_what_is_submitted_to_an_engine_that_sleeps_or_loads_raises_why(llm: LLM, folders: list[Path]) -> None:
    weights = list(load_file(folders[1] / "model.safetensors").items())
    llm.sleep()
    with pytest.raises(RuntimeError, match="the engine is asleep"):
        llm.submit(PROMPTS[0], GREEDY).result(timeout=60)
    llm.wake_up()
    llm.load_weights(weights[:3], finish=False)
    with pytest.raises(RuntimeError, match="new weights are being loaded"):
        llm.submit(PROMPTS[0], GREEDY).result(timeout=60)
    llm.load_weights(weights[3:])
    assert llm.submit(PROMPTS[0], GREEDY).result(timeout=60)["token_ids"]


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
