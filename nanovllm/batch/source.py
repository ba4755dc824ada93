"""The input of a job, a file or a folder of files: its lines, read lazily, and what they are known by."""

import gzip
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import xxhash

STANDARD = "-"
"""In place of a path: standard input, or standard output."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What an input is known by when a job goes on: where it lies does not matter, nor whether it is packed.

    Attributes:
        num_lines: those that are not blank.
        num_bytes, xxh3_128: of the content, unpacked.
    """

    num_lines: int
    num_bytes: int
    xxh3_128: str


def is_file(path: str) -> bool:
    """Whether a path is a file or a folder, there or to be made, rather than a pipe, a device or a terminal."""
    return path != STANDARD and (Path(path).is_file() or Path(path).is_dir() or not Path(path).exists())


def read_lines(path: str) -> Iterator[tuple[int, bytes]]:
    """(number, line) of every line that is not blank, numbered from 1 as they lie in the input, blank ones included.

    A folder's files are read in the order of their names, as if they were one.

    Raises:
        ValueError: a file cannot be read, or its packing is broken, or the folder is empty.
    """
    for number, line in enumerate(_all_lines(path), start=1):
        if not line.isspace():
            yield number, line


def survey(path: str) -> Survey:
    """Read the input once, for its length and its fingerprint; ValueError as for `read_lines`."""
    digest, num_lines, num_bytes = xxhash.xxh3_128(), 0, 0
    for line in _all_lines(path):
        digest.update(line)
        num_bytes += len(line)
        num_lines += not line.isspace()
    return Survey(num_lines, num_bytes, digest.hexdigest())


def _all_lines(path: str) -> Iterator[bytes]:
    for name in _files(path):
        with _open(name) as file:
            yield from file


def _files(path: str) -> list[str]:
    """A file itself; of a folder, what is in it, sorted, but for hidden files."""
    if not Path(path).is_dir():
        return [path]
    names = sorted(str(file) for file in Path(path).iterdir() if not file.name.startswith("."))
    if not names:
        raise ValueError(f"the input {path} is an empty folder")
    return names


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
