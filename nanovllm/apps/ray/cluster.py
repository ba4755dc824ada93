"""Runs a batch job on a Ray cluster. Engines on many machines answer parts of the input; one file gets all results.

    machine of the command    lines -> parts of lines ----+                         +----> results
    Ray Data, any machine                                 +-> engines -> results ---+

The machine of the command reads the input and writes the results, so the other machines need not see these files.
"""

import logging
import os
import pickle
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import islice
from math import ceil
from typing import Any, NamedTuple

import pyarrow
import ray
from ray.data import DataContext

from nanovllm.apps.jobs.answering import Answering
from nanovllm.apps.jobs.compact_sets import DigestSet
from nanovllm.apps.jobs.job import Job, Status
from nanovllm.apps.jobs.line_adapters import LineAdapters
from nanovllm.apps.jobs.provenance import read_provenance
from nanovllm.apps.jobs.request_lines import LineError, read_request_line
from nanovllm.apps.jobs.result_lines import ResultLine, make_error_line
from nanovllm.apps.jobs.run import OpenJob, load_llm, supervise
from nanovllm.apps.jobs.source import InputDigest, Line, Reading, Source
from nanovllm.apps.ray.data import MAX_BATCHES, actors
from nanovllm.config import DEFAULT_NUM_SEQS, EngineConfig
from nanovllm.features.sharing import EngineThread
from nanovllm.utils.checks import refuse


def run_on_ray(job: Job, num_actors: int = 0) -> Status:
    """Run a job on a cluster, or resume it. The results are those of `run_job`, and either may resume the other's job.

    The cluster is that at RAY_ADDRESS, or else one of this machine alone, made for this job. It gets data_parallel_size
    engines.

    Args:
        num_actors: how many actors share the engines. Those of an actor are the replicas of one `LLM`, on one machine.
            0 means that each engine has an actor.
    """
    return supervise(job, partial(_answer, num_actors=num_actors or job.config.data_parallel_size))


def _answer(work: OpenJob, num_actors: int) -> None:
    config = work.job.config
    if num_actors < 1 or config.data_parallel_size % num_actors:
        raise refuse(num_actors, "ray", f"a divisor of replicas, which is {config.data_parallel_size}")
    config = replace(config, data_parallel_size=config.data_parallel_size // num_actors)
    if work.first_reading is None or work.num_left is None:
        raise ValueError("with --ray the input must be a file or a folder: a pipe cannot be read twice")
    if config.trace is not None:
        raise ValueError("trace is a file of one engine: leave it out with --ray")
    work.check_adapters(are_allowed=False)
    size = lines_per_part(work.num_left)
    num_seqs = (config.max_num_seqs or DEFAULT_NUM_SEQS) * config.data_parallel_size
    with _cluster(config, num_actors) as on_gpu, work.counts.show(lambda: vars(work.counts)):
        pool = actors(
            num_actors,
            data_parallel_size=config.data_parallel_size,
            tensor_parallel_size=config.tensor_parallel_size,
            pipeline_parallel_size=config.pipeline_parallel_size,
            on_gpu=on_gpu,
            num_batches=parts_in_flight(size, ceil(work.num_left / size), num_actors, num_seqs),
        )
        digest = None
        for results, engine, end in _answer_parts(work, config, work.first_reading.numbers, size, pool):
            work.manifest.check_engine(engine)
            for result in results:
                work.write(result)
            digest = end or digest
    if digest is None:
        raise RuntimeError("the input was not read to its end")
    work.check_complete(work.first_reading.numbers, digest)


# ---- parts


def lines_per_part(num_lines: int) -> int:
    """Return the lines of a part, from 16 to 1000, for about a thousand parts."""
    return min(1000, max(16, num_lines // 1000))


def parts_in_flight(size: int, num_parts: int, num_actors: int, num_rows: int) -> int:
    """Return how many parts an actor works on at a time: enough to fill two steps, and no more than its share."""
    wanted = max(2, 2 * num_rows // size + 1)
    return min(wanted, ceil(num_parts / num_actors), MAX_BATCHES)


class Part(NamedTuple):
    """Some lines of the input. In place of a line that cannot be run stands its result, an error.

    Attributes:
        digest: the digest of the whole input. Only the last part has it, and that part has no lines.
    """

    lines: list[Line | ResultLine]
    digest: InputDigest | None = None


AnsweredPart = tuple[list[ResultLine], dict[str, str], InputDigest | None]
"""The results of a part, the provenance of the engine that gave them, and the part's digest."""


def read_parts(source: Source, size: int, done: Container[int], known: Container[int]) -> Iterator[Part]:
    """Yield the lines that are known and not done, in parts of `size`, and then the part that has the digest.

    A line that cannot be parsed, or whose id was seen before, is answered here, because only here all lines are seen.
    """
    ids = DigestSet()
    reading = Reading(source)

    def check_lines() -> Iterator[Line | ResultLine]:
        for line in reading:
            checked: Line | ResultLine = line
            try:
                read_request_line(line, ids.add)
            except LineError as error:
                checked = make_error_line(line.number, error)
            if line.number in known and line.number not in done:
                yield checked

    lines = check_lines()
    while part := list(islice(lines, size)):
        yield Part(part)
    yield Part([], reading.digest)


class PartAnswerer:
    """An `LLM` in an actor. `map_batches` calls it with tables of one part each."""

    def __init__(self, config: EngineConfig, model_name: str, defaults: Mapping[str, Any]) -> None:
        self._llm = load_llm(config)
        self._engine = EngineThread(self._llm.engine)
        self._provenance = read_provenance(self._llm.engine)
        self._names = (model_name, defaults)

    def __call__(self, table: pyarrow.Table) -> pyarrow.Table:
        part = _unpack(table)
        results = [line for line in part.lines if isinstance(line, ResultLine)]
        lines = (line for line in part.lines if isinstance(line, Line))
        adapters = LineAdapters(self._llm, are_allowed=False)
        Answering(self._llm, results.append, *self._names, adapters, stream=self._engine.stream).answer(lines)
        return _pack((results, self._provenance, part.digest))


# ---- Ray Data


def _pack(part: Part | AnsweredPart) -> pyarrow.Table:
    """Return a table of one row, which Ray Data hands on."""
    return pyarrow.table({"part": pyarrow.array([pickle.dumps(part)], pyarrow.large_binary())})


def _unpack(table: pyarrow.Table) -> Any:
    return pickle.loads(table["part"][0].as_py())


def _answer_parts(
    work: OpenJob, config: EngineConfig, known: Container[int], size: int, pool: Mapping[str, Any]
) -> Iterator[AnsweredPart]:
    """Yield the results of each part, in the order in which the parts end."""
    job = work.job
    source = work.source
    done = deepcopy(work.done)
    # An engine's process may have another working directory.
    folders = {"model": config.model, "lora": config.lora, "tokenizer": config.tokenizer}
    here: dict[str, Any] = {
        name: os.path.abspath(path) for name, path in folders.items() if path is not None and os.path.isdir(path)
    }
    config = replace(config, **here)

    def read(_: pyarrow.Table) -> Iterator[pyarrow.Table]:
        for part in read_parts(source, size, done, known):
            yield _pack(part)

    context = DataContext.get_current().copy()
    context.target_max_block_size = 1  # byte: each part becomes a block of its own, and so a task of its own
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    with DataContext.current(context):
        # One task reads all parts, on this machine, while the engines ask for them.
        parts = ray.data.from_items([None]).map_batches(
            read,
            batch_format="pyarrow",
            num_cpus=0,  # engines keep their CPUs, so a reader that asked for one might wait for ever
            label_selector={"ray.io/node-id": ray.get_runtime_context().get_node_id()},
        )
        answered = parts.map_batches(
            PartAnswerer,
            fn_constructor_args=(config, job.model_name, job.sampling),
            batch_size=1,
            batch_format="pyarrow",
            **pool,
        )
        for table in answered.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
            yield _unpack(table)


@contextmanager
def _cluster(config: EngineConfig, num_actors: int) -> Iterator[bool]:
    """Connect to a cluster, or make one of this machine alone. Yields whether the engines run on GPUs.

    Args:
        config: that of an actor.

    Raises:
        ValueError: the cluster does not answer, or the actors do not fit into it.
    """
    ranks = config.num_ranks * config.data_parallel_size
    is_ours = not ray.is_initialized()
    if is_ours:
        address = os.environ.get("RAY_ADDRESS") or "local"
        # A new cluster gets as many CPUs as the engines need, even if the machine has fewer: sharing a CPU is slow, but
        # Ray would wait for ever for one that is not there.
        num_cpus = {"num_cpus": max(os.cpu_count() or 1, num_actors * ranks + 1)} if address == "local" else {}
        # Ray logs a spurious error for every actor that may be restarted. This hides it.
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
        try:
            ray.init(address, log_to_driver=False, logging_level=logging.WARNING, **num_cpus)
        except ConnectionError as error:
            raise ValueError(f"no Ray cluster answers at {address}: {error}") from error
    try:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        on_gpu = config.device != "cpu" and (config.device != "auto" or any(node.get("GPU") for node in nodes))
        check_room(nodes, "GPU" if on_gpu else "CPU", num_actors, ranks, config.data_parallel_size)
        yield on_gpu
    finally:
        if is_ours:
            ray.shutdown()


def check_room(
    nodes: Sequence[Mapping[str, float]], kind: str, num_actors: int, per_actor: int, num_engines: int = 1
) -> None:
    """Raise a ValueError if the actors do not fit into the cluster. Ray itself would wait for ever.

    Args:
        nodes: the resources of each machine.
        kind: "CPU" or "GPU".
        per_actor: how many of that kind each actor takes, all on one machine.
        num_engines: how many engines an actor has.
    """
    room = sum(int(node.get(kind, 0)) // per_actor for node in nodes)
    if room < num_actors:
        have = " + ".join(f"{node.get(kind, 0):g}" for node in nodes)
        most = max(room, 1)
        raise ValueError(
            f"the cluster has {have} {kind}s; {num_actors} actors of {per_actor} {kind}s need "
            f"{num_actors * per_actor}, and Ray would wait for them for ever: use --ray {most} --replicas "
            f"{most * num_engines}, or start Ray with --num-{kind.lower()}s"
        )
