"""The input of a job, a file or a folder of files: its lines, read lazily, and the digest of its content."""

import gzip
import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import xxhash

from nanovllm.batch.compact import LineSet
from nanovllm.utils.checks import quote

STANDARD = "-"
"""In place of a path: standard input, or standard output."""
MAX_LINE_BYTES = 32 << 20


class Line(NamedTuple):
    """A line that is not blank.

    Attributes:
        number: from 1, as lines lie in the input, blank ones included.
        is_cut: it is longer than it may be, and raw is its beginning.
    """

    number: int
    raw: bytes
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class InputDigest:
    """Tells one input from another, wherever they lie and whether or not they are packed.

    Attributes:
        num_lines: those that are not blank.
        num_bytes, xxh3_128: of the content, unpacked.
    """

    num_lines: int
    num_bytes: int
    xxh3_128: str


def is_file(path: str) -> bool:
    """Whether a path is a file or a folder, there or to be made, rather than a pipe, a device or a terminal.

    Raises:
        ValueError: the path is none that a file could have.
    """
    try:
        return path != STANDARD and (Path(path).is_file() or Path(path).is_dir() or not Path(path).exists())
    except OSError as error:
        raise ValueError(f"{quote(path)} cannot be a file: {error.strerror}") from error


class Source:
    """Where requests come from: files, listed once, so that what comes into a folder later is not read.

    Attributes:
        files: absolute paths, or "-". A folder stands for the files in it, in the order of their names, without hidden
            ones.
    """

    def __init__(self, path: str, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        """Raises a ValueError if there is no such file or folder, or the folder is empty."""
        self.path, self.max_line_bytes = path, max_line_bytes
        self.is_file, self.is_folder = is_file(path), Path(path).is_dir()
        if path == STANDARD:
            self.files = [path]
        elif self.is_folder:
            self.files = sorted(str(file.absolute()) for file in Path(path).iterdir() if not file.name.startswith("."))
            if not self.files:
                raise ValueError(f"the input {path} is an empty folder")
        elif Path(path).exists():
            self.files = [os.path.abspath(path)]
        else:
            raise ValueError(f"the input {quote(path)} does not exist")


class Reading:
    """One reading of a source, whose files are read as if they were one. Iterate over it, once, for its lines.

    Attributes:
        numbers: of the lines that have come.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.numbers = LineSet()
        self._hash, self._num_bytes = xxhash.xxh3_128(), 0

    def __iter__(self) -> Iterator[Line]:
        """Raises a ValueError if a file cannot be read, or its packing is broken."""
        number = 0
        for name in self._source.files:
            with _open(name) as file:
                while line := self._read_line(file, number := number + 1):
                    if line.is_cut or not line.raw.isspace():
                        self.numbers.add(number)
                        yield line
                number -= 1

    def _read_line(self, file: BinaryIO, number: int) -> Line | None:
        """The next line, blank or not; None at the end. Of one that is too long, the rest is passed over."""
        limit = self._source.max_line_bytes
        raw = piece = file.readline(limit + 1)
        if not raw:
            return None
        self._take_in(raw)
        is_cut = len(raw) > limit and not raw.endswith(b"\n")
        while is_cut and piece and not piece.endswith(b"\n"):
            piece = file.readline(1 << 20)
            self._take_in(piece)
        return Line(number, raw, is_cut)

    def _take_in(self, content: bytes) -> None:
        self._hash.update(content)
        self._num_bytes += len(content)

    @property
    def digest(self) -> InputDigest:
        """Of what has been read so far."""
        return InputDigest(len(self.numbers), self._num_bytes, self._hash.hexdigest())


@contextmanager
def _open(path: str) -> Iterator[BinaryIO]:
    try:
        if path == STANDARD:
            yield sys.stdin.buffer
        else:
            with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
                yield file  # type: ignore[misc]  # gzip's files are read as others are
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"the input {path} cannot be read: {error}") from error
