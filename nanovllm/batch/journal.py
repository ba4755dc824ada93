"""The file of results: appended to a whole line at a time, and gone on with after whatever ended the run before."""

import contextlib
import fcntl
import json
import logging
import os
import stat
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanovllm.batch.answers import answered_line
from nanovllm.batch.compact import LineSet
from nanovllm.batch.source import STANDARD

logger = logging.getLogger(__name__)

SYNC_SECONDS = 1.0
"""A line is with the operating system at once, which survives a kill -9, and on the disk after at most this long."""


class OutputError(Exception):
    """The results cannot be written. What was appended before is whole."""


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
        except BaseException as error:
            self._cut()
            if isinstance(error, OSError):
                raise OutputError(f"{self._name} cannot be written: {error.strerror or error}") from error
            raise
        if self._end is not None:
            self._end += len(line)
            self._is_dirty = True

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
        """Bring everything to the disk; OutputError if that fails."""
        self._closing.set()
        if self._end is None:
            return
        self._thread.join()
        try:
            if self._failure is not None:
                raise self._failure
            self._sync()
        except OSError as error:
            raise OutputError(f"{self._name} cannot be written: {error.strerror or error}") from error
        finally:
            os.close(self._descriptor)


@dataclass
class Earlier:
    """What runs before this one have left in the file."""

    done: LineSet = field(default_factory=LineSet)
    num_failed: int = 0
    end: int = 0


def open_journal(path: str, card: Mapping[str, Any] | None, overwrite: bool) -> tuple[Journal, Earlier]:
    """Open the results, new or begun.

    Args:
        path: a file, or "-".
        card: what a job is known by, kept beside the file; None if the job cannot be gone on with.

    Raises:
        ValueError: the file cannot be opened, is another job's, is written by another process, or is damaged.
        OutputError: it cannot be written.
    """
    if path == STANDARD:
        return Journal(1, "standard output", None), Earlier()
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise ValueError(f"{path} cannot be opened for writing: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return Journal(descriptor, path, None), Earlier()
        earlier = _take_over(descriptor, Path(path), card, overwrite)
        return Journal(descriptor, path, earlier.end), earlier
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError):
            raise OutputError(f"{path} cannot be written: {error.strerror or error}") from error
        raise


def _take_over(descriptor: int, path: Path, card: Mapping[str, Any] | None, overwrite: bool) -> Earlier:
    """Check that the file is this job's, read what it holds, and repair its end."""
    lock(descriptor, path)
    card_path = path.with_name(path.name + ".job.json")
    if overwrite:  # the old results go before their card: whatever comes between, no results lie under a wrong one
        os.ftruncate(descriptor, 0)
        os.fsync(descriptor)
    size = os.fstat(descriptor).st_size
    if size:
        check_card(path, card_path, card)
    elif card is None:
        card_path.unlink(missing_ok=True)
    else:
        write_json(card_path, card)
    earlier = _read_back(path)
    if earlier.end < size:
        logger.warning(
            "%s: its end is torn: the last %d bytes are taken away, and done again", path, size - earlier.end
        )
        os.ftruncate(descriptor, earlier.end)
        os.fsync(descriptor)
    return earlier


def lock(descriptor: int, path: Path) -> None:
    """Keep others from writing there until the descriptor is closed; ValueError if another process does."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{path} is being written by another process") from None


def _read_back(path: Path) -> Earlier:
    """Raises a ValueError if a line is damaged and whole ones follow, which no crash leaves behind."""
    earlier, offset = Earlier(), 0
    torn_number = None
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            offset += len(line)
            answered = answered_line(line) if line.endswith(b"\n") else None
            if answered is None:
                torn_number = torn_number or number
                continue
            if torn_number is not None:
                raise ValueError(f"{path}: line {torn_number} is damaged: remove that line to have it done again")
            earlier.done.add(answered[0])
            earlier.num_failed += answered[1]
            earlier.end = offset
    return earlier


def check_card(path: Path, card_path: Path, card: Mapping[str, Any] | None) -> None:
    """Raises a ValueError that says what differs."""
    start_anew = "--overwrite starts anew, another -o leaves it as it is"
    if card is None:
        raise ValueError(f"{path} has results, and a job that reads from a pipe cannot go on with them: {start_anew}")
    try:
        first = json.loads(card_path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not empty, and {card_path} is no job's ({error}): {start_anew}") from error
    differences = list(_differences(first, card))
    if differences:
        raise ValueError(f"{path} is of another job: {'; '.join(differences)}: {start_anew}")


def _differences(first: Any, now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    first = first if isinstance(first, dict) else {}
    for name in {**first, **now}:
        before, after = first.get(name), now.get(name)
        if isinstance(after, Mapping):
            yield from _differences(before, after, f"{prefix}{name}.")
        elif before != after:
            yield f"{prefix}{name} was {before!r} and is {after!r}"


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a file as JSON, as `write_whole` does."""
    write_whole(path, json.dumps(data, indent=2).encode() + b"\n")


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is there wholly or, whatever happens, as it was before. Raises an OSError."""
    new = path.with_name(path.name + ".new")
    with open(new, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
