"""The file of results: appended to a whole line at a time, and resumed after whatever ended the run before."""

import contextlib
import fcntl
import logging
import os
import stat
import threading
from dataclasses import dataclass, field
from pathlib import Path

from nanovllm.jobs.answers import answered_line
from nanovllm.jobs.compact import LineSet
from nanovllm.jobs.manifest import Manifest, remove_stale
from nanovllm.jobs.source import STANDARD, is_file

logger = logging.getLogger(__name__)

SYNC_SECONDS = 1.0
"""A line is with the operating system at once, which survives a kill -9, and on the disk after at most this long."""


class OutputError(Exception):
    """The results cannot be written. What was appended before is whole."""


@dataclass
class ResumeState:
    """What earlier runs have left in the results.

    Attributes:
        done: numbers of the requests that are answered.
        num_failed: how many of the answers are errors.
        end: bytes, where the last whole line ends.
    """

    done: LineSet = field(default_factory=LineSet)
    num_failed: int = 0
    end: int = 0


class Journal:
    """Appends lines to a file or a stream. What a file holds is whole lines, also when the disk is full.

    A thread of its own brings a file to the disk, so that a slow disk does not hold up the engine.
    """

    def __init__(self, descriptor: int, name: str, end: int | None) -> None:
        """end: where the file's last whole line ends; None for a stream, which is neither synced nor cut."""
        self._descriptor, self._name, self._end = descriptor, name, end
        self._is_dirty = False
        self._failure: OSError | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._sync_again_and_again, daemon=True)
        if end is not None:
            os.lseek(descriptor, end, os.SEEK_SET)
            self._thread.start()

    def append(self, line: bytes) -> None:
        """Raises an OutputError if the line cannot be written, or one before it could not be synced."""
        try:
            if self._failure is not None:
                raise self._failure
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            if self._end is not None:
                self._end += len(line)
                self._is_dirty = True
        except BaseException as error:
            self._cut()
            if isinstance(error, OSError):
                raise OutputError(f"{self._name} cannot be written: {error.strerror or error}") from error
            raise

    def _cut(self) -> None:
        """Take away what was written of a line that could not be finished."""
        if self._end is not None:
            with contextlib.suppress(OSError):  # then the next run does it
                os.ftruncate(self._descriptor, self._end)

    def _sync_again_and_again(self) -> None:
        while not self._closing.wait(SYNC_SECONDS):
            try:
                self._sync()
            except OSError as error:
                self._failure = error
                return

    def _sync(self) -> None:
        if self._is_dirty:
            self._is_dirty = False
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Bring everything to the disk; OutputError if that fails, or another has changed the file meanwhile."""
        self._closing.set()
        if self._end is None:
            return
        self._thread.join()
        try:
            if self._failure is not None:
                raise self._failure
            self._sync()
            if os.fstat(self._descriptor).st_size != self._end:
                raise OSError("another process has changed it")
        except OSError as error:
            raise OutputError(f"{self._name} cannot be written: {error.strerror or error}") from error
        finally:
            os.close(self._descriptor)


def open_journal(path: str, manifest: Manifest, numbers: LineSet, overwrite: bool) -> tuple[Journal, ResumeState]:
    """Open the results, new or begun.

    Args:
        path: a file, or "-".
        numbers: of the requests.

    Raises:
        ValueError: the file cannot be opened, is another job's, is written by another process, or is damaged.
        OutputError: it cannot be written.
    """
    if path == STANDARD:
        return Journal(1, "standard output", None), ResumeState()
    if Path(path).is_dir():
        parts = " Results of many parts are an older version's, and cannot be resumed." if _has_parts(path) else ""
        raise ValueError(f"{path} cannot be opened for writing: it is a folder.{parts} -o names a file")
    try:
        # A pipe that this process could read, too, would not break when its reader dies, but block for ever.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT if is_file(path) else os.O_WRONLY, 0o666)
    except OSError as error:
        raise ValueError(f"{path} cannot be opened for writing: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return Journal(descriptor, path, None), ResumeState()
        state = _take_over(descriptor, Path(path), manifest, numbers, overwrite)
        return Journal(descriptor, path, state.end), state
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError):
            raise OutputError(f"{path} cannot be written: {error.strerror or error}") from error
        raise


def _has_parts(path: str) -> bool:
    return any(Path(path).glob("part-*.jsonl"))


def _take_over(descriptor: int, path: Path, manifest: Manifest, numbers: LineSet, overwrite: bool) -> ResumeState:
    """Check that the file is this job's, read what it holds, and repair its end."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{path} is being written by another process") from None
    remove_stale(manifest.path)
    if overwrite:  # the old results go before their manifest: whatever comes between, none lie under a wrong one
        os.ftruncate(descriptor, 0)
        os.fsync(descriptor)
    size = os.fstat(descriptor).st_size
    if size:
        manifest.resume(size)
    else:
        manifest.create()
    state = _read_back(path, manifest.has_checksums, numbers)
    if state.end < size:
        logger.warning("%s: its end is torn: the last %d bytes are taken away, and done again", path, size - state.end)
        os.ftruncate(descriptor, state.end)
        os.fsync(descriptor)
    return state


def _read_back(path: Path, has_checksums: bool, numbers: LineSet) -> ResumeState:
    """Read the results.

    Raises:
        ValueError: a line is damaged and whole ones follow, which no crash leaves behind, or answers no request or one
            that is answered already.
    """
    state, offset = ResumeState(), 0
    torn = None
    with open(path, "rb") as lines:
        for at, line in enumerate(lines, start=1):
            offset += len(line)
            answered = answered_line(line, has_checksums) if line.endswith(b"\n") else None
            if answered is None:
                torn = torn or at
                continue
            number, is_error = answered
            if torn is not None:
                raise ValueError(f"{path}: line {torn} is damaged: remove that line to have it done again")
            if number not in numbers:
                raise ValueError(f"{path}: line {at} answers line {number}, which the input lacks: remove that line")
            if not state.done.add(number):
                raise ValueError(f"{path}: line {at} answers line {number} a second time: remove that line")
            state.num_failed += is_error
            state.end = offset
    return state
