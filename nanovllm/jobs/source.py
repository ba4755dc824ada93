"""The input of a job, a file or a folder of files: its lines, read lazily, and the digest of its content."""

import codecs
import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from gzip import GzipFile
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from nanovllm.jobs.compact import LineSet
from nanovllm.utils.checks import quote

STANDARD = "-"
"""In place of a path: standard input, or standard output."""
MAX_LINE_BYTES = 32 << 20


class InputError(Exception):
    """The input cannot be read, or read to its end."""


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
        """Raises an InputError if a file cannot be read, or its packing is broken, or it holds no lines of UTF-8."""
        number, limit = 0, self._source.max_line_bytes
        for name in self._source.files:
            with _open(name) as file:
                while raw := file.readline(limit + 1):
                    number += 1
                    self._hash.update(raw)
                    self._num_bytes += len(raw)
                    if is_cut := len(raw) > limit and not raw.endswith(b"\n"):
                        self._pass_over_line(file)
                    elif raw.isspace():
                        continue
                    self.numbers.add(number)
                    yield Line(number, raw, is_cut)

    def _pass_over_line(self, file: BufferedReader) -> None:
        """Read to the end of a line that is too long, a piece at a time."""
        piece = b"-"
        while piece and not piece.endswith(b"\n"):
            piece = file.readline(1 << 20)
            self._hash.update(piece)
            self._num_bytes += len(piece)

    @property
    def digest(self) -> InputDigest:
        """Of what has been read so far."""
        return InputDigest(len(self.numbers), self._num_bytes, self._hash.hexdigest())


def _check_kind(path: str, beginning: bytes) -> None:
    """Raises an InputError for a file that would be an error in every line."""
    if beginning.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in beginning[:4]:
        raise InputError(f"the input {path} is UTF-16 or binary, not UTF-8: iconv -f UTF-16 -t UTF-8 converts it")
    if beginning.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        raise InputError(f"the input {path} is one JSON array, not a request a line: jq -c '.[]' converts it")


@contextmanager
def _open(path: str) -> Iterator[BufferedReader]:
    """The file, unpacked if it is gzip, which its first bytes tell, not its name."""
    try:
        opened: Any = nullcontext(sys.stdin.buffer) if path == STANDARD else open(path, "rb")  # noqa: SIM115  # just below
        with opened as raw:
            file = raw if hasattr(raw, "peek") else BufferedReader(raw)
            if file.peek(2)[:2] == b"\x1f\x8b":
                file = BufferedReader(GzipFile(fileobj=file))
            _check_kind(path, file.peek(64)[:64])
            yield file
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"the input {path} cannot be read: {error}") from error
