"""Writes the file of results, one whole line at a time, and reads it back when a job is resumed."""

import fcntl
import logging
import os
import shutil
import stat
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex

from nanovllm.apps.jobs.compact_sets import DigestMap, LineSet
from nanovllm.apps.jobs.job import OutputError, cannot_write
from nanovllm.apps.jobs.manifest import Manifest
from nanovllm.apps.jobs.result_lines import read_result_line
from nanovllm.apps.jobs.source import STANDARD, is_file

logger = logging.getLogger(__name__)

SYNC_SECONDS = 1.0
"""A line is with the operating system at once, where it survives a kill -9, and on the disk after this time at most."""


@dataclass
class EarlierResults:
    """The results of earlier runs.

    Attributes:
        done: the numbers of the input lines that have a result.
        num_failed: how many of these results are errors.
        offsets: {name of a request: the offset of its result}.
        end: the offset in bytes after the last whole line.
    """

    done: LineSet = field(default_factory=LineSet)
    num_failed: int = 0
    offsets: DigestMap = field(default_factory=DigestMap)
    end: int = 0


class ResultsFile:
    """Appends lines to a file or a stream. A file always holds whole lines, even if the disk is full.

    A thread brings the file to the disk every second, so that a slow disk does not delay the engine. The thread also
    checks that the path still leads to the file. Nothing can keep other processes from moving or changing the file, so
    this class notices it, raises an OutputError, and saves a copy of a file that was moved or removed.
    """

    def __init__(self, descriptor: int, path: str, end: int | None, manifest: Manifest) -> None:
        """
        Args:
            descriptor: the descriptor of the opened file. `close` closes it, which also gives the lock back.
            end: the offset in bytes after the file's last whole line; None for a stream, which is never synced or cut.
            manifest: is copied together with the results.
        """
        self._descriptor = descriptor
        self._path = Path(os.path.abspath(path))
        self._name = path
        self._end = end
        self._manifest = manifest
        self._failure: OSError | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._sync_regularly, daemon=True)
        if end is not None:
            self._thread.start()

    @property
    def size(self) -> int:
        """How many bytes the file has; 0 if it is a stream."""
        return self._end or 0

    def append(self, line: bytes) -> int:
        """Write one line, and return its offset in the file, 0 in a stream.

        Raises:
            OutputError: that fails, or a check of the file has failed before.
        """
        try:
            if self._failure is not None:
                raise self._failure
            self._check_size()
            rest = memoryview(line)
            try:
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
            except BaseException:
                if self._end is not None:
                    with suppress(OSError):  # if this fails, the next run takes the torn line away
                        os.ftruncate(self._descriptor, self._end)
                raise
        except OSError as error:
            raise cannot_write(self._name, error) from error
        if self._end is None:
            return 0
        self._end += len(line)
        return self._end - len(line)

    def sync(self) -> None:
        """Bring the lines to the disk. OutputError if that fails."""
        try:
            self._sync()
        except OSError as error:
            raise cannot_write(self._name, error) from error

    def _check_size(self) -> None:
        if self._end is not None and (size := os.fstat(self._descriptor).st_size) != self._end:
            raise OSError(f"another process has changed it: it has {size} bytes, and this job wrote {self._end}")

    def _sync_regularly(self) -> None:
        while not self._closing.wait(SYNC_SECONDS):
            try:
                self._sync()
            except OSError as error:
                self._failure = error
                return

    def _sync(self) -> None:
        """Bring the file to the disk. Raises an OSError if that fails, or if the path does not lead to it any more."""
        os.fsync(self._descriptor)
        if not _leads_to(self._path, self._descriptor):
            raise OSError("it was moved or removed")

    def close(self) -> None:
        """Bring everything to the disk.

        Raises:
            OutputError: that failed, or the file was moved, removed or changed during the job.
        """
        try:
            if self._end is None:
                return
            self._closing.set()
            self._thread.join()
            if not _leads_to(self._path, self._descriptor):
                raise OutputError(self._save_copy())
            if self._failure is not None:
                raise self._failure
            self._sync()
            self._check_size()
        except OSError as error:
            raise cannot_write(self._name, error) from error
        finally:
            os.close(self._descriptor)

    def _save_copy(self) -> str:
        """Copy the results and the manifest to a new name; return the message that tells it."""
        problem = f"{self._name} was moved or removed while the job ran"
        folder = next(folder for folder in self._path.parents if folder.is_dir())
        new = folder / f"rescued-{token_hex(8)}.jsonl"
        try:
            with open(self._descriptor, "rb", closefd=False) as results, open(new, "xb") as copy:
                results.seek(0)
                shutil.copyfileobj(results, copy)
                copy.flush()
                os.fsync(copy.fileno())
            can_resume = self._manifest.save_for(new)
        except OSError as error:
            with suppress(OSError):
                new.unlink()
            return f"{problem}, and its results cannot be copied: {error}"
        advice = f": the same command with -o {new} resumes the job" if can_resume else ""
        return f"{problem}; its results are copied to {new}{advice}"


def _leads_to(path: Path, descriptor: int) -> bool:
    """Return whether a path still leads to an open file."""
    opened = os.fstat(descriptor)
    try:
        return opened.st_nlink > 0 and os.path.samestat(opened, os.stat(path))
    except OSError:
        return False


def lock_file(descriptor: int, path: str) -> None:
    """Keep other jobs from a file, or a folder, until the descriptor is closed. ValueError if one has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{path} is being written by another process") from None


def open_results(
    path: str,
    manifest: Manifest,
    numbers: LineSet,
    overwrite: bool,
    recover: Callable[[int], int] = lambda size: size,
) -> tuple[ResultsFile, EarlierResults]:
    """Open the results, new or begun, and read what earlier runs wrote.

    Args:
        path: a file, or "-".
        numbers: the numbers of the input lines.
        recover: returns, for the size of the results in bytes, how many of these bytes may stay.

    Returns:
        The file, and the results of earlier runs.

    Raises:
        ValueError: the file cannot be opened, is another job's, is written by another process, or is damaged.
        OutputError: it cannot be written.
    """
    if path == STANDARD:
        return ResultsFile(os.dup(1), "standard output", None, manifest), EarlierResults()
    # A pipe is opened for writing only: if this process could read it too, a write would block after its reader died.
    mode = os.O_RDWR | os.O_CREAT | os.O_APPEND if is_file(path) else os.O_WRONLY
    try:
        descriptor = os.open(path, mode, 0o666)
    except OSError as error:
        raise ValueError(f"{path} cannot be opened for writing: {error.strerror}") from error
    with ExitStack() as after_failure:
        after_failure.callback(os.close, descriptor)
        earlier = EarlierResults()
        end = None
        try:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                lock_file(descriptor, path)
                earlier = _prepare_file(descriptor, Path(path), manifest, numbers, overwrite, recover)
                end = earlier.end
        except OSError as error:
            raise cannot_write(path, error) from error
        after_failure.pop_all()
        return ResultsFile(descriptor, path, end, manifest), earlier


def _prepare_file(
    descriptor: int,
    path: Path,
    manifest: Manifest,
    numbers: LineSet,
    overwrite: bool,
    recover: Callable[[int], int],
) -> EarlierResults:
    """Check that the file is this job's, read its results, and cut off a torn last line."""
    if overwrite:  # the results go before their manifest, so that old results never lie beside a new manifest
        os.ftruncate(descriptor, 0)
        os.fsync(descriptor)
    size = os.fstat(descriptor).st_size
    if size:
        manifest.resume(size)
    else:
        manifest.create()
    if (kept := recover(size)) < size:
        os.ftruncate(descriptor, kept)
        os.fsync(descriptor)
        size = kept
    earlier = _read_earlier(path, numbers)
    if earlier.end < size:
        logger.warning("%s: the last line is torn: its %d bytes are removed", path, size - earlier.end)
        os.ftruncate(descriptor, earlier.end)
        os.fsync(descriptor)
    return earlier


def _read_earlier(path: Path, numbers: LineSet) -> EarlierResults:
    """Read the results of earlier runs.

    Raises:
        ValueError: a line is damaged and whole ones follow, which no crash leaves behind, or a line answers no line of
            the input, or one that is answered already.
    """
    earlier = EarlierResults()
    offset = 0
    damaged_at = None
    with open(path, "rb") as lines:
        for at, line in enumerate(lines, start=1):
            offset += len(line)
            result = read_result_line(line) if line.endswith(b"\n") else None
            if result is None:
                damaged_at = damaged_at or at
                continue
            number = result.number
            if damaged_at is not None:
                raise ValueError(f"{path}: line {damaged_at} is damaged: remove that line to have it done again")
            if number not in numbers:
                raise ValueError(f"{path}: line {at} answers line {number}, which the input lacks: remove that line")
            if not earlier.done.add(number):
                raise ValueError(f"{path}: line {at} answers line {number} a second time: remove that line")
            earlier.num_failed += result.is_error
            if result.request_name:
                earlier.offsets.add(result.request_name, offset - len(line))
            earlier.end = offset
    return earlier
