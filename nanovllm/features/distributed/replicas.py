"""Several engines on this machine, each in a process, behind one queue of requests: data_parallel_size.

    user's process                                          each replica (replica.py)
    ReplicatedEngine.step -- socket --> requests -->        LLMEngine, with a scheduler, a cache and ranks of its own
                          <-- socket -- outputs, counts --

The user's process tokenises, validates and numbers requests, and chooses their seeds: `LLMEngine.prepare` and `add` do
it as for one engine. So a request's tokens do not depend on the replica that runs it. Requests wait in one queue. The
replica that has least work gets the next one, as long as it has room.

What happens when a process dies:

    a replica ends           Its socket closes, and another replica starts in its place. Its requests go to the front of
                             the queue. A request that was in two replicas when they ended then runs in one without
                             company. If that ends, too, the request is the cause: it ends with an error.
    a replica is stopped     (SIGSTOP, swap, a driver) It counts as ended after max_silence seconds without a message.
    a replica cannot start   While the engine is made: an error, and the others end. Later it is left out.
    the user's process ends  The operating system closes its sockets. A thread of each replica sees that, and ends it.
"""

import logging
import os
import socket
import struct
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import wait
from operator import attrgetter
from subprocess import TimeoutExpired
from typing import Any

import torch

from nanovllm.config import EngineConfig, ResolvedConfig
from nanovllm.engine.interfaces import StepObserver
from nanovllm.engine.llm_engine import OPEN_RUN, LLMEngine, ModelFacts
from nanovllm.engine.sequence import Sequence
from nanovllm.features.distributed.follower_group import PATIENCE
from nanovllm.features.distributed.follower_process import BEAT, describe_end, describe_silence, start_process
from nanovllm.features.distributed.replica import ABORT, Start
from nanovllm.models.model_folder import ModelFolder, read_tokenizer
from nanovllm.outputs import Output
from nanovllm.utils.checks import refuse
from nanovllm.utils.machine import cpu_quota, list_sockets
from nanovllm.utils.memory import free_memory

logger = logging.getLogger(__name__)

MOST_MOVES = 2
"""A request goes to another replica at most so often."""
POLL = 0.05
"""Most seconds of one wait for messages of replicas. New requests, and Ctrl-C, wait as long."""
RUNS = (OPEN_RUN.name, "submit()")
"""The activities that several replicas can have."""


# ---- shares of the machine


def share_machine(config: EngineConfig) -> list[Start]:
    """Divide GPUs or cores, the quota of processor time and the free memory among the replicas.

    Raises:
        ValueError: a replica would have no GPU, or no core. The message says how many replicas there may be.
    """
    count = config.data_parallel_size
    cores = share_cores(list_sockets(), count)
    most = cpu_quota() / count
    if (asked := os.environ.get("OMP_NUM_THREADS", "")).isdigit():
        most = min(most, int(asked))
    variables = [{"OMP_NUM_THREADS": str(int(max(1, min(len(own), most))))} for own in cores]
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        if not all(cores):
            num_cores = count - cores.count([])
            raise refuse(count, "data_parallel_size", f"at most {num_cores}, the cores that this process may use")
    elif config.device in ("auto", "cuda"):
        gpus = share_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count(), count, config.num_ranks)
        variables = [own | {"CUDA_VISIBLE_DEVICES": gpu} for own, gpu in zip(variables, gpus, strict=True)]
        cores = [[]] * count  # the system moves their few threads as it likes
    else:
        raise refuse(config.device, "device", f'"cuda", "cpu" or "auto" with data_parallel_size={count}')
    config = replace(config, data_parallel_size=1)
    memory = free_memory() // count
    return [Start(config, set().union(*cores[i]), memory, variables[i]) for i in range(count)]


def share_cores(sockets: list[list[set[int]]], count: int) -> list[list[set[int]]]:
    """Return the cores of each replica, all of one socket. If there are more replicas than cores, some have none.

    Args:
        sockets: the cores by socket, as `list_sockets` returns them.
    """
    counts = [0] * len(sockets)
    for _ in range(count):
        roomiest = max(range(len(sockets)), key=lambda i: len(sockets[i]) / (counts[i] + 1))
        counts[roomiest] += 1
    return [
        cores[i * len(cores) // num : (i + 1) * len(cores) // num]
        for cores, num in zip(sockets, counts, strict=True)
        for i in range(num)
    ]


def share_gpus(visible: str | None, num_gpus: int, count: int, num_ranks: int) -> list[str]:
    """Return the variable CUDA_VISIBLE_DEVICES of each replica.

    Args:
        visible: the variable in this process; None if it is not set.
        num_gpus: how many GPUs this process can use.
    """
    if num_gpus < count * num_ranks:
        each = "an engine fills one GPU" if num_ranks == 1 else f"a replica has {num_ranks} GPUs"
        raise ValueError(
            f"data_parallel_size is {count}, and {each}: {count} replicas need {count * num_ranks} GPUs, and there are "
            f"{num_gpus}. Lower data_parallel_size; one engine already computes many sequences at once (max_num_seqs)"
        )
    names = visible.split(",") if visible else [str(i) for i in range(num_gpus)]
    return [",".join(names[i * num_ranks : (i + 1) * num_ranks]) for i in range(count)]


# ---- processes


class Replica:
    """The process of one replica, and the requests that it has. Each message has new values of some attributes."""

    def __init__(self, number: int, start: Start) -> None:
        self.number = number
        self.config: ResolvedConfig | None = None
        """Its engine's; None until that is loaded."""
        self.stats: dict[str, int] = {}
        """The newest counts of its engine."""
        self.ended: list[tuple[int, Output]] = []
        """The requests that ended by the newest message."""
        self.is_aborting = False
        """True from ABORT on until no request runs."""
        self.error: Exception | None = None
        """Why it ends."""
        self.sequences: dict[int, Sequence] = {}
        """The lead of each request that it has, by number."""
        self.load = 0
        """How many rows these take, in all."""
        self.silence = 0.0
        """Seconds since its last message, as `ReplicaGroup.receive` counts them."""
        self.max_silence = start.config.max_silence
        self.start = start
        self.connection, self.process = start_process("replica", start, start.variables)
        self.limit_waits(self.max_silence)

    def limit_waits(self, seconds: float) -> None:
        """Let a read or a write fail with a BlockingIOError after so many seconds in which no byte moves.

        If the process is stopped in the midst of a message, the rest never comes; and what is sent to it fills the
        socket.
        """
        timeout = struct.pack("ll", int(seconds), 0)  # struct timeval
        with socket.socket(fileno=os.dup(self.connection.fileno())) as end:
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                end.setsockopt(socket.SOL_SOCKET, option, timeout)

    def send(self, message: Any) -> None:
        try:
            self.connection.send(message)
        except BlockingIOError:  # a part may have been sent
            self.kill_for_silence()
        except OSError:  # it has ended, which `ReplicaGroup.receive` will tell
            pass

    def receive(self) -> bool:
        """Take a message, and return whether the process lives."""
        self.silence = 0.0
        try:
            vars(self).update(self.connection.recv())
        except BlockingIOError:
            self.kill_for_silence()
            return False
        except (EOFError, OSError):
            return False
        return True

    def kill_for_silence(self) -> None:
        self.error = TimeoutError(describe_silence(self.process, self.max_silence))
        self.process.kill()


class ReplicaGroup:
    """The processes of all replicas. It is the runner of a `ReplicatedEngine`, which closes it."""

    def __init__(self) -> None:
        self.replicas: list[Replica] = []
        self._waited_at = time.monotonic()
        """When `receive` last waited."""
        # Runs at the latest when this object is collected or the interpreter exits, if nobody calls close().
        self.close = weakref.finalize(self, _end_replicas, self.replicas, os.getpid())

    def start(self, starts: list[Start]) -> None:
        """Start the replicas, and return when they have loaded.

        Raises:
            ValueError: a replica refuses the options.
            RuntimeError: a replica has failed.
        """
        for number, start in enumerate(starts):
            self.replicas.append(Replica(number, start))
        while any(replica.config is None for replica in self.replicas):
            for replica, is_alive in self.receive():
                if not is_alive:
                    kind = ValueError if isinstance(replica.error, ValueError) else RuntimeError
                    raise kind(describe_failure(replica))

    def receive(self) -> Iterator[tuple[Replica, bool]]:
        """Wait for messages for a moment. Yield the replicas that have one, or have ended, and whether they live.

        A replica that has been silent for too long is killed, and counts as ended.
        """
        silent: dict[Any, Replica] = {replica.connection: replica for replica in self.replicas}
        senders = [silent.pop(connection) for connection in wait(list(silent), POLL)]
        # If this process was stopped meanwhile, or busy elsewhere, messages of that time have yet to be read. So one
        # round counts as a second at most, however long ago the last one was.
        seconds = min(time.monotonic() - self._waited_at, BEAT)
        self._waited_at = time.monotonic()
        for replica in senders:
            yield replica, replica.receive()
        for replica in silent.values():
            replica.silence += seconds
            if replica.silence > replica.max_silence:
                replica.kill_for_silence()
                yield replica, False

    def replace(self, replica: Replica) -> None:
        """Start another process in the place of a replica that has ended; none if it had not loaded."""
        _end_replicas([replica], os.getpid())
        place = self.replicas.index(replica)
        others = [] if replica.config is None else [Replica(replica.number, replica.start)]
        self.replicas[place : place + 1] = others


def describe_failure(replica: Replica) -> str:
    """Return which replica has ended, and how."""
    return f"replica {replica.number} failed: {replica.error or describe_end(replica.process, PATIENCE)}"


def _end_replicas(replicas: list[Replica], pid: int) -> None:
    """End replicas after the step in hand. Those that load, or do not end, are killed. A fork of `pid` does nothing."""
    if os.getpid() != pid:
        return
    for replica in replicas:
        if replica.config is None:
            replica.process.kill()
        replica.limit_waits(PATIENCE)
        replica.send(None)
        replica.connection.close()
    deadline = time.monotonic() + PATIENCE
    for replica in replicas:
        with suppress(TimeoutExpired):
            replica.process.wait(max(deadline - time.monotonic(), 0))
        replica.process.kill()
        try:
            replica.process.wait(PATIENCE)
        except TimeoutExpired:  # a driver may keep it
            logger.error("replica %d, process %d, cannot be killed", replica.number, replica.process.pid)


# ---- the engine


def check_activity(activity: str) -> None:
    """Raise a ValueError if several replicas cannot have an activity."""
    if activity not in RUNS:
        raise ValueError(f"{activity} is for one engine, and data_parallel_size is above 1: leave that out")


class ReplicatedEngine(LLMEngine):
    """Deals requests out to replicas, and collects their outputs. To `LLM` it is one engine.

    Its scheduler is only the queue. A sequence here stands for a request that waits, or that a replica has.
    """

    runner: Any
    """The `ReplicaGroup`."""

    def __init__(self, *parts: Any, **options: Any) -> None:
        """See `LLMEngine`."""
        super().__init__(*parts, **options)
        self.claim.on_begin = check_activity
        self._outputs: dict[Sequence, Output] = {}
        """The outputs that have arrived and that nobody has asked for yet, by the lead of the request."""
        self._deaths: Counter[Sequence] = Counter()
        """How many replicas have ended while they had a request, by its lead."""
        self._past: Counter[str] = Counter()
        """The counts of replicas that have ended."""
        self._failure = ""
        """How the last of them ended."""

    def step(self) -> list[Sequence]:
        """Deal out requests, wait for messages, and return the leads of the requests that have ended.

        Raises:
            RuntimeError: no replica is left. After any exception the engine is closed.
        """
        try:
            if not self.runner.replicas:
                raise RuntimeError(self._failure)
            self._deal_out()
            finished = self._receive()
        except BaseException:
            self.close()  # a message may have been read in part
            raise
        bars: list[Any] = self.observers
        for bar in bars:
            bar.update(0)
        return finished

    def _deal_out(self) -> None:
        """Give waiting requests to the replicas that have room, each to the one that has least work."""
        waiting = self.scheduler.waiting
        loaded = [replica for replica in self.runner.replicas if replica.config is not None]
        room = self.config.max_num_seqs * 5 // 4  # some wait there, so that it has requests when others end
        while waiting and loaded:
            seq = waiting[0]
            if seq.lead is None:  # the other completions go with the first one
                replica = min(loaded, key=attrgetter("load"))
                # A request that has seen two replicas end fills the third one.
                num_rows = room if self._deaths[seq] == MOST_MOVES else seq.params.n
                if replica.load > 0 and replica.load + num_rows > room:
                    break
                replica.sequences[seq.seq_id] = seq
                replica.load += num_rows
                replica.send((seq.seq_id, seq.prompt_token_ids, seq.params, seq.seed, seq.prompt, seq.limit))
            waiting.popleft()

    def _receive(self) -> list[Sequence]:
        """Wait for messages for a moment, and return the leads of the requests that have ended."""
        finished = []
        for replica, is_alive in self.runner.receive():
            if not is_alive:
                finished += self._replace(replica)
                continue
            for number, output in replica.ended:
                seq = replica.sequences.pop(number, None)
                if seq is not None:  # it was not aborted meanwhile
                    replica.load = replica.load - seq.params.n if replica.sequences else 0
                    output.request_id = str(number)
                    seq.token_ids.extend(output["token_ids"])
                    seq.finish_reason = output["finish_reason"]
                    self._outputs[seq] = output
                    finished.append(seq)
            replica.ended = []
        return finished

    def _replace(self, replica: Replica) -> list[Sequence]:
        """Put the requests of a replica that has ended back into the queue, and start another one.

        Returns:
            The leads of requests that are the cause. They end with an error.
        """
        self._failure = describe_failure(replica)
        numbers = ", ".join(map(str, replica.sequences)) or "none"
        logger.error("%s. Its requests go to the others: %s", self._failure, numbers)
        self._past.update({name: count for name, count in replica.stats.items() if not name.endswith("blocks")})
        self.runner.replace(replica)
        causes = []
        for seq in reversed(replica.sequences.values()):
            self._deaths[seq] += 1
            if self._deaths[seq] <= MOST_MOVES:
                self.scheduler.waiting.appendleft(seq)
                continue
            seq.error = f"request {seq.seq_id} has ended {self._deaths[seq]} replicas; the last: {self._failure}"
            for one in (seq, *seq.others):
                one.finish_reason = "error"
            causes.append(seq)
        return causes

    def abort_all(self) -> None:
        """Drop all requests, and return when the steps of the replicas that ran them have ended."""
        self.scheduler.abort_all()
        for replica in self.runner.replicas:
            if replica.sequences:
                replica.sequences.clear()
                replica.load = 0
                replica.is_aborting = True
                replica.send(ABORT)
        while any(replica.is_aborting for replica in self.runner.replicas):
            self._receive()
        self._outputs.clear()
        self._deaths.clear()

    def make_output(self, seq: Sequence) -> Output:
        """Return the output of a request that has ended. It is made here only if no replica could run the request."""
        output = self._outputs.pop(seq, None)
        return super().make_output(seq) if output is None else output

    def observe(self, observer: StepObserver) -> None:
        """Raise a ValueError: the steps are those of other processes."""
        check_activity("observe()")

    def stats(self) -> dict[str, int]:
        """Return the sums of the replicas' counts, as they were at their newest messages."""
        sums = self._past.copy()
        for replica in self.runner.replicas:
            sums.update(replica.stats)
        return dict(sums)


def load_replicas(
    asked: EngineConfig, folder: ModelFolder | None, facts: ModelFacts, assemble: Callable[..., LLMEngine]
) -> LLMEngine:
    """Start the replicas, and return the engine that deals requests out to them.

    Args:
        folder, facts: the model's, as load.py reads them.
        assemble: load.py's function.

    Raises:
        ValueError: there are too few GPUs or cores, or a replica refuses the options.
        RuntimeError: a replica has failed; the others have ended.
    """
    if asked.trace is not None:
        raise refuse(asked.trace, "trace", f"None with data_parallel_size={asked.data_parallel_size}")
    group = ReplicaGroup()
    try:
        group.start(share_machine(asked))
        first: Any = group.replicas[0]
        # Drafts are the replicas' business.
        lengths = [replica.config.max_model_len for replica in group.replicas if replica.config is not None]
        config = replace(first.config, data_parallel_size=asked.data_parallel_size, speculative_config=None)
        config = replace(config, max_model_len=min(lengths))  # their pools may differ by some blocks
        tokenizer = read_tokenizer(asked.tokenizer, folder, config.max_model_len)
        engine = assemble(config, facts, tokenizer, group, first.stats["num_blocks"], ReplicatedEngine)
    except BaseException:
        group.close()
        raise
    logger.info("%d replicas of %s on %s", len(group.replicas), config.model, config.device)
    return engine
