"""A batch job on a Ray cluster: parts of the input go to engines on many machines, and a file comes of each.

    the command's machine     lines -> parts of lines ----+                         +----> part-000007.jsonl
    Ray Data, any machine                                 +-> engines -> answers ---+

Input and results are read and written on the machine that runs the command, so that the others need not see them.
"""

import logging
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Any

import pyarrow
import ray
from ray.data import DataContext, Datasource, ReadTask
from ray.data.block import BlockMetadata

from nanovllm.batch.answers import answered_line, error_line
from nanovllm.batch.compact import DigestSet
from nanovllm.batch.job import Answer, Job, answer_lines, conclude, fingerprint
from nanovllm.batch.journal import OutputError, check_card, lock, write_json, write_whole
from nanovllm.batch.protocol import LineError, read_envelope
from nanovllm.batch.source import is_file, read_lines
from nanovllm.batch.status import Status
from nanovllm.batch.tally import COUNTS, Tally
from nanovllm.config import EngineConfig
from nanovllm.ray import MAX_BATCHES, SharedLLM, actors

logger = logging.getLogger(__name__)


def run_on_ray(job: Job, replicas: int = 1, address: str | None = None) -> Status:
    """Run a job on a cluster, or go on with it: as `run_job`, but the output is a folder of parts.

    Args:
        replicas: engines.
        address: of the cluster; None is RAY_ADDRESS, or a cluster of this machine alone, made for this job.
    """
    return conclude(job, lambda tally: _run(job, tally, replicas, address))


def _run(job: Job, tally: Tally, replicas: int, address: str | None) -> None:
    if replicas < 1:
        raise ValueError(f"replicas is {replicas}; it must be at least 1")
    if not is_file(job.input) or not is_file(job.output):
        raise ValueError("with --ray the input is a file or a folder and the output a folder: a pipe cannot be either")
    if job.config.trace is not None:
        raise ValueError("trace is a file of one engine: leave it out with --ray")
    card = fingerprint(job, tally)
    num_lines = tally.num_lines or 0
    size = lines_per_part(num_lines)
    with _open_folder(Path(job.output), card, job.overwrite) as folder:
        done = _read_back(folder, tally)
        num_left = ceil(num_lines / size) - len(done)
        if num_left == 0:
            return
        if done:
            logger.info("%s: going on after %d parts", folder, len(done))
        with _cluster(address, job.config, replicas) as on_gpu, tally.show(lambda: vars(tally)):
            pool = actors(
                replicas,
                tensor_parallel_size=job.config.tensor_parallel_size,
                on_gpu=on_gpu,
                num_batches=parts_in_flight(size, num_left, replicas, job.config.max_num_seqs),
            )
            for part in _answers(job, size, done, pool):
                try:
                    write_whole(_part_path(folder, part["part"]), part["answers"])
                except OSError as error:
                    raise OutputError(f"{folder} cannot be written: {error.strerror or error}") from error
                tally.add(part)


# ---- parts


def lines_per_part(num_lines: int) -> int:
    """About a thousand parts, of 16 to 1000 lines. The input alone decides, so that every run has the same parts."""
    return min(1000, max(16, num_lines // 1000))


def parts_in_flight(size: int, num_parts: int, replicas: int, max_num_seqs: int) -> int:
    """Parts that an engine works on at a time: enough to run and to wait for it, and no more than its share."""
    wanted = max(2, 2 * max_num_seqs // size + 1)
    return min(wanted, ceil(num_parts / replicas), MAX_BATCHES)


def read_parts(path: str, size: int, done: Container[int]) -> Iterator[dict[str, Any]]:
    """Cut the input into parts, and yield those that are not done.

    Lines that are bad by themselves, or by an id that was there before, are answered here, where all lines come by.
    """
    ids, lines = DigestSet(), read_lines(path)
    number = 0
    while chunk := list(islice(lines, size)):
        good, errors = [], []
        for line_number, raw in chunk:
            try:
                read_envelope(raw, line_number, ids.add)
                good.append((line_number, raw))
            except LineError as error:
                errors.append(error_line(line_number, error))
        if number not in done:
            yield {"part": number, "numbers": [n for n, _ in good], "lines": [raw for _, raw in good], "errors": errors}
        number += 1


class PartAnswerer:
    """One engine, for `map_batches` over batches of one part."""

    def __init__(self, config: EngineConfig, model_name: str) -> None:
        options = asdict(config)
        self._llm, self._model_name = SharedLLM(options.pop("model"), **options), model_name

    def __call__(self, batch: pyarrow.Table) -> pyarrow.Table:
        (part,) = batch.to_pylist()
        lines, tally = list(part["errors"]), Tally(num_failed=len(part["errors"]))

        def emit(answer: Answer) -> None:
            lines.append(answer.line)
            tally.count(answer.output)

        answer_lines(self._llm, zip(part["numbers"], part["lines"], strict=True), emit, self._model_name)
        counts = {name: getattr(tally, name) for name in COUNTS}
        return pyarrow.Table.from_pylist([{"part": part["part"], "answers": b"".join(lines), **counts}])


# ---- Ray Data


class _Parts(Datasource):  # type: ignore[misc]  # where Ray is not installed, it has no types
    """The parts that are not done, each a block of one row, read by one task as engines ask for them."""

    _SCHEMA = pyarrow.schema(
        {
            "part": pyarrow.int64(),
            "numbers": pyarrow.list_(pyarrow.int64()),
            "lines": pyarrow.large_list(pyarrow.large_binary()),
            "errors": pyarrow.large_list(pyarrow.large_binary()),
        }
    )

    def __init__(self, path: str, size: int, done: Container[int]) -> None:
        super().__init__()
        self._path, self._size, self._done = os.path.abspath(path), size, done

    def get_name(self) -> str:
        return "Parts"

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: DataContext | None = None
    ) -> list[ReadTask]:
        path, size, done, schema = self._path, self._size, self._done, self._SCHEMA

        def read() -> Iterator[pyarrow.Table]:
            for part in read_parts(path, size, done):
                yield pyarrow.Table.from_pylist([part], schema)

        unknown = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        return [ReadTask(read, unknown, schema=schema)]


def _answers(job: Job, size: int, done: Container[int], pool: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """{part, answers, counts} of every part that is not done, as they finish."""
    model = job.config.model  # an engine's process may have another working directory
    config = replace(job.config, model=os.path.abspath(model) if os.path.isdir(model) else model)
    context = DataContext.get_current().copy()
    context.target_max_block_size = 1  # bytes: so that a part is a block, and with it a task, of its own
    context.enable_progress_bars = context.print_on_execution_start = False
    with DataContext.current(context):
        parts = ray.data.read_datasource(
            _Parts(job.input, size, done),
            override_num_blocks=1,
            num_cpus=0,  # it mostly waits, and must not wait for a CPU that an engine never gives back
            label_selector={"ray.io/node-id": ray.get_runtime_context().get_node_id()},
        )
        answers = parts.map_batches(
            PartAnswerer,
            fn_constructor_args=(config, job.model_name),
            batch_size=1,
            batch_format="pyarrow",
            **pool,
        )
        for batch in answers.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
            yield from batch.to_pylist()


@contextmanager
def _cluster(address: str | None, config: EngineConfig, replicas: int) -> Iterator[bool]:
    """Connect to a cluster, or make one of this machine; gives whether engines run on GPUs.

    Raises:
        ValueError: the cluster is not there, or the engines do not fit into it.
    """
    tp = config.tensor_parallel_size
    is_ours = not ray.is_initialized()
    if is_ours:
        address = address or os.environ.get("RAY_ADDRESS") or "local"
        # As many as are needed, whatever the machine has: an engine of a few CPUs is slow, one that waits never ends.
        num_cpus = {"num_cpus": max(os.cpu_count() or 1, replicas * tp + 1)} if address == "local" else {}
        try:
            ray.init(address, log_to_driver=False, logging_level=logging.WARNING, **num_cpus)
        except ConnectionError as error:
            raise ValueError(f"no Ray cluster answers at {address}: {error}") from error
    try:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        on_gpu = config.device != "cpu" and (config.device != "auto" or any(node.get("GPU") for node in nodes))
        check_room(nodes, "GPU" if on_gpu else "CPU", replicas, tp)
        yield on_gpu
    finally:
        if is_ours:
            ray.shutdown()


def check_room(nodes: Sequence[Mapping[str, float]], kind: str, replicas: int, each: int) -> None:
    """Raises a ValueError if the engines do not fit into the cluster, where Ray would wait for ever.

    Args:
        nodes: the resources of each machine.
        kind: CPU or GPU; every engine takes `each` of them, all on one machine.
    """
    room = sum(int(node.get(kind, 0)) // each for node in nodes)
    if room < replicas:
        have = " + ".join(f"{node.get(kind, 0):g}" for node in nodes)
        raise ValueError(
            f"the cluster has {have} {kind}s; {replicas} engines of {each} {kind}s need {replicas * each}, and Ray "
            f"would wait for them for ever: use --replicas {max(room, 1)}, or start Ray with --num-{kind.lower()}s"
        )


# ---- the folder of results


def _part_path(folder: Path, number: int) -> Path:
    return folder / f"part-{number:06}.jsonl"


@contextmanager
def _open_folder(folder: Path, card: Mapping[str, Any], overwrite: bool) -> Iterator[Path]:
    """Make or take over the folder of results, and keep other processes from it.

    Raises:
        ValueError: it is another job's, or being written by another process.
        OutputError: it cannot be written.
    """
    card_path = folder / "job.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ValueError(f"{folder} cannot be a folder of results: {error.strerror}") from error
    try:
        lock(descriptor, folder)
        if overwrite:
            for path in folder.glob("part-*.jsonl"):
                path.unlink()
        if any(folder.glob("part-*.jsonl")):
            check_card(folder, card_path, card)
        else:
            write_json(card_path, card)
        yield folder
    except OSError as error:
        raise OutputError(f"{folder} cannot be written: {error.strerror or error}") from error
    finally:
        os.close(descriptor)


def _read_back(folder: Path, tally: Tally) -> set[int]:
    """The numbers of the parts that are there, which are whole; their answers are counted."""
    done = set()
    for path in folder.glob("part-*.jsonl"):
        done.add(int(path.stem.removeprefix("part-")))
        with open(path, "rb") as lines:
            for line in lines:
                answered = answered_line(line)
                if answered is None:
                    raise ValueError(f"{path} is damaged: remove it to have that part done again")
                tally.num_earlier += 1
                tally.num_failed += answered[1]
    tally.num_succeeded = tally.num_earlier - tally.num_failed
    return done
