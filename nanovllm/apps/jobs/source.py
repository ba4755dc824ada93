"""Reads the input of a job, a file or a folder of files, line by line, and computes the digest of its content."""

import codecs
import os
import shlex
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from gzip import GzipFile
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from nanovllm.apps.jobs.compact_sets import LineSet
from nanovllm.utils.checks import quote

STANDARD = "-"
"""Stands for standard input or standard output where a path is expected."""
MAX_LINE_BYTES = 32 << 20
"""A longer line is answered by an error, and never held in memory."""

PACKED = {
    b"BZh": ("bzip2", "bzcat"),
    b"\xfd7zXZ\0": ("xz", "xzcat"),
    b"\x28\xb5\x2f\xfd": ("Zstandard", "zstdcat"),
    b"\x04\x22\x4d\x18": ("LZ4", "lz4cat"),
    b"PK\x03\x04": ("zip", "unzip -p"),
    b"7z\xbc\xaf\x27\x1c": ("7-Zip", "7z e -so"),
}
"""{the first bytes of a packed file: (its kind, a command that writes the content to standard output)}"""


class InputError(Exception):
    """The input cannot be read, or read to its end."""


class Line(NamedTuple):
    """One line of the input. Blank lines are counted, but skipped.

    Attributes:
        number: the line's number in the input, from 1.
        is_cut: the line is longer than MAX_LINE_BYTES, and raw is only its beginning.
    """

    number: int
    raw: bytes
    is_cut: bool = False


class InputDigest(NamedTuple):
    """Identifies the content of an input. Its path and its compression do not matter.

    Attributes:
        num_lines: how many lines the input has, without the blank ones.
        num_bytes, xxh3_128: the size and the digest of the unpacked content.
    """

    num_lines: int
    num_bytes: int
    xxh3_128: str


def is_file(path: str) -> bool:
    """Return whether a path is, or could become, a file or a folder: not a pipe, a device or a terminal.

    Raises:
        ValueError: no file can have this path.
    """
    try:
        return path != STANDARD and (Path(path).is_file() or Path(path).is_dir() or not Path(path).exists())
    except OSError as error:
        raise ValueError(f"{quote(path)} cannot be a file: {error.strerror}") from error


class Source:
    """The files that hold the requests. A folder is listed once, so files that are added to it later are not read.

    Attributes:
        files: absolute paths, or "-". For a folder: its files in the order of their names, without hidden ones.
    """

    def __init__(self, path: str) -> None:
        """Raises a ValueError if there is no such file or folder, or the folder is empty."""
        self.path = path
        self.is_file = is_file(path)
        self.is_folder = Path(path).is_dir()
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
    """Reads a source once, as if its files were one. Iterate over it once to get its lines.

    Attributes:
        numbers: the numbers of the lines read so far.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.numbers = LineSet()
        self._hash = xxhash.xxh3_128()
        self._num_bytes = 0

    def __iter__(self) -> Iterator[Line]:
        """Raises an InputError if a file cannot be read or unpacked, or is no UTF-8 text."""
        number = 0
        for name in self._source.files:
            with _open(name) as file:
                while raw := file.readline(MAX_LINE_BYTES + 1):
                    number += 1
                    self._hash.update(raw)
                    self._num_bytes += len(raw)
                    if is_cut := len(raw) > MAX_LINE_BYTES and not raw.endswith(b"\n"):
                        self._skip_rest_of_line(file)
                    elif raw.isspace():
                        continue
                    self.numbers.add(number)
                    yield Line(number, raw, is_cut)

    def _skip_rest_of_line(self, file: BufferedReader) -> None:
        """Read to the end of a line that is too long, 1 MiB at a time."""
        piece = b"-"
        while piece and not piece.endswith(b"\n"):
            piece = file.readline(1 << 20)
            self._hash.update(piece)
            self._num_bytes += len(piece)

    @property
    def digest(self) -> InputDigest:
        """The digest of everything read so far."""
        return InputDigest(len(self.numbers), self._num_bytes, self._hash.hexdigest())


def _check_kind(path: str, beginning: bytes) -> None:
    """Raise an InputError if the file is of a kind in which every line would be an error."""
    for kind, is_this in (("parquet", beginning[:4] == b"PAR1"), ("csv", path.lower().endswith(".csv"))):
        if is_this:
            convert = f"pandas.read_{kind}({path!r}).to_json({f'{path}.jsonl'!r}, orient='records', lines=True)"
            raise InputError(f'the input {path} is {kind}, not JSON: python -c "import pandas; {convert}" converts it')
    for mark, (kind, command) in PACKED.items():
        if beginning.startswith(mark):
            raise InputError(
                f"the input {path} is packed with {kind}, and only gzip is unpacked here: "
                f"{command} {shlex.quote(path)} > unpacked.jsonl"
            )
    if beginning.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in beginning:
        raise InputError(f"the input {path} is UTF-16 or binary, not UTF-8: iconv -f UTF-16 -t UTF-8 converts it")
    if beginning.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        raise InputError(f"the input {path} is one JSON array, not one request per line: jq -c '.[]' converts it")


@contextmanager
def _open(path: str) -> Iterator[BufferedReader]:
    """Open a file, and unpack it if its first bytes are those of gzip; the name does not matter."""
    try:
        opened: Any = nullcontext(sys.stdin.buffer) if path == STANDARD else open(path, "rb")  # noqa: SIM115  # closed by `with` below
        with opened as raw:
            file = raw if hasattr(raw, "peek") else BufferedReader(raw)
            if file.peek(2)[:2] == b"\x1f\x8b":
                file = BufferedReader(GzipFile(fileobj=file))
            _check_kind(path, file.peek(64)[:64])
            yield file
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"the input {path} cannot be read: {error}") from error
