"""The input of a job: its lines, read lazily, and what they are known by."""

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
    """Whether a path is a file, there or to be made, rather than a pipe, a device or a terminal."""
    return path != STANDARD and (Path(path).is_file() or not Path(path).exists())


def read_lines(path: str) -> Iterator[tuple[int, bytes]]:
    """(number, line) of every line that is not blank, numbered from 1 as they lie in the file, blank ones included.

    Raises:
        ValueError: the file cannot be read, or its packing is broken.
    """
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.isspace():
                yield number, line


def survey(path: str) -> Survey:
    """Read the file once, for its length and its fingerprint; ValueError as for `read_lines`."""
    digest, num_lines, num_bytes = xxhash.xxh3_128(), 0, 0
    with _open(path) as file:
        for line in file:
            digest.update(line)
            num_bytes += len(line)
            num_lines += not line.isspace()
    return Survey(num_lines, num_bytes, digest.hexdigest())


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
