"""Reads what stands in front of a GGUF file's tensors: its metadata, and where each tensor lies.

A file may come from anywhere, so nothing that it says is believed: each count and each length is compared with the
bytes that are there before anything is read. The format is llama.cpp's
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

import mmap
import re
import struct
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from nanovllm.models.model_folder import check_is_file
from nanovllm.utils.checks import quote

Value = TypeVar("Value")

MAGIC = b"GGUF"
VERSION = 3
SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
"""The name of one of several files: the first is number 00001."""

MOST_HEADER = 1 << 26
"""The most bytes in front of the tensors. A vocabulary of 262,144 tokens takes 15 MB."""
MOST_NAME = 1 << 16
"""The most bytes of a key or of a tensor's name, as in the format's description."""
MOST_DIMENSIONS = 4
MOST_SPLITS = 9999
LEAST_KEY = 8 + 4 + 1
"""The bytes of the smallest key with its value."""
LEAST_TENSOR = 8 + 4 + 8 + 4 + 8
"""The bytes of the smallest description of a tensor."""

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""{number of a type of values: its letter in struct}."""
STRING = 8
ARRAY = 9
LENGTH = struct.Struct("<Q")


class Place(NamedTuple):
    """Where a tensor lies. `shape` has the rows before the columns, as torch has it."""

    type_name: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    num_bytes: int


class GgufFile:
    """A model in GGUF: one file, or all files of a split one, of which any may be named.

    Attributes:
        path: the file, or the first of several.
        files: all of them, in order.
        metadata: {key: value}, of the first file.
        tensors: {name: its place}, of all files.
    """

    def __init__(self, path: Path) -> None:
        """Read the headers.

        Raises:
            ValueError: a file is damaged, or is not there, or they contradict each other: the message says what and
                where. Or the package gguf is not installed.
        """
        self.files = list_splits(path)
        self.path = self.files[0]
        parts = [read_header(file) for file in self.files]
        self.metadata, self.tensors = parts[0]
        check_splits(self.files, [metadata for metadata, _ in parts], [len(tensors) for _, tensors in parts])
        for file, (_, tensors) in zip(self.files[1:], parts[1:], strict=True):
            if double := self.tensors.keys() & tensors.keys():
                raise ValueError(f"{file}: tensor {quote(min(double))} is in another file too")
            self.tensors |= tensors


def list_splits(path: Path) -> list[Path]:
    """Return all files of a model of which one is named; ValueError if one is not there."""
    match = SPLIT.fullmatch(path.name)
    if match is None:
        return [path]
    own = int(match[2])
    count = int(match[3])
    if not 1 <= own <= count <= MOST_SPLITS:
        raise ValueError(f"{path} is called number {own} of {count} files")
    files = [path.with_name(f"{match[1]}-{number:05d}-of-{match[3]}.gguf") for number in range(1, count + 1)]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"{path.parent} lacks {len(missing)} of {count} files: {', '.join(missing[:5])}")
    return files


def check_splits(files: list[Path], metadata: list[dict[str, Any]], num_tensors: list[int]) -> None:
    """Raise a ValueError if what files say of their number, of each other and of their tensors is not so."""
    for number, (file, own) in enumerate(zip(files, metadata, strict=True)):
        facts = {  # {key: (what the files show, what it is if a file does not say it)}
            "split.no": (number, 0 if len(files) == 1 else None),
            "split.count": (len(files), 1 if len(files) == 1 else None),
            "split.tensors.count": (sum(num_tensors), sum(num_tensors)),
        }
        for key, (right, default) in facts.items():
            found = own.get(key, default)
            # A file that was split into one may say that there are 0.
            if found != right and not (key == "split.count" and len(files) == 1 and found == 0):
                raise ValueError(f"{file}: {key} is {quote(found)}, and by the files' names and tensors it is {right}")
        for key, value in own.items():
            if number and not key.startswith("split.") and metadata[0].get(key, value) != value:
                raise ValueError(f"{file}: {quote(key)} is not what {files[0].name} says")


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, Place]]:
    """Return the metadata and the tensors of one file."""
    check_is_file(path)
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            # An empty file cannot be mapped.
            data = mmap.mmap(file.fileno(), min(size, MOST_HEADER), access=mmap.ACCESS_READ) if size else b""
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    cursor = Cursor(data, path, size)
    num_tensors, num_keys = read_start(cursor)
    metadata = read_named(cursor, "key", num_keys, read_value)
    return metadata, read_places(cursor, num_tensors, read_alignment(metadata, path))


class Cursor:
    """Reads numbers and texts of a file, one after another.

    Attributes:
        size: the file's bytes.
        at: the next byte that is read.
        place: what is being read, for messages.
    """

    def __init__(self, data: "bytes | mmap.mmap", path: Path, size: int) -> None:
        """
        Args:
            data: the first bytes of the file, in which the header must lie.
        """
        self.path = path
        self.size = size
        self.at = 0
        self.place = "the header"
        self._data = data

    def fail(self, what: str) -> ValueError:
        """Return the error that says what is wrong where."""
        return ValueError(f"{self.path}: {self.place}, byte {self.at}: {what}")

    def reserve(self, num_bytes: int, what: str) -> int:
        """Step over so many bytes, and return where they begin; ValueError if they are not there."""
        left = len(self._data) - self.at
        if num_bytes > left:
            end = (
                "the file ends" if len(self._data) == self.size else f"a header of {MOST_HEADER} bytes, the most, ends"
            )
            raise self.fail(f"{what} would take {num_bytes} bytes, and {end} after {left}")
        start = self.at
        self.at += num_bytes
        return start

    def read_bytes(self, num_bytes: int, what: str) -> bytes:
        """Return so many bytes."""
        start = self.reserve(num_bytes, what)
        return self._data[start : self.at]

    def read(self, letter: str, what: str) -> Any:
        """Return the number whose type has this letter in struct."""
        form = f"<{letter}"
        start = self.reserve(struct.calcsize(form), what)
        return struct.unpack_from(form, self._data, start)[0]

    def read_text(self, what: str, most: int = MOST_HEADER) -> str:
        """Return a text, in front of which stands its length."""
        length = self.read("Q", f"the length of {what}")
        if length > most:
            raise self.fail(f"{what} has {length} bytes; the most are {most}")
        return self.decode(self.read_bytes(length, what), what)

    def read_texts(self, count: int, what: str) -> list[str]:
        """Return so many texts: those of a vocabulary, which are many."""
        texts = []
        limit = len(self._data)
        for _ in range(count):
            at = self.at + LENGTH.size  # where the text begins, behind its length
            end = at + LENGTH.unpack_from(self._data, self.at)[0] if at <= limit else at
            if end > limit:
                raise self.fail(f"{what} ends at byte {end}, and {limit} bytes are there")
            texts.append(self._data[at:end])
            self.at = end
        return [self.decode(text, what) for text in texts]

    def decode(self, text: bytes, what: str) -> str:
        """Return a text as a str; ValueError if it is no UTF-8."""
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"{what}, {quote(text)}, is no UTF-8: {error.reason}") from None

    def read_count(self, least: int, what: str) -> int:
        """Return a count of things of which each takes at least so many bytes."""
        count: int = self.read("Q", what)
        left = len(self._data) - self.at
        if count * least > left:
            raise self.fail(f"{what} is {count}, for which {left} bytes are too few")
        return count

    def read_numbers(self, letter: str, count: int, what: str) -> list[Any]:
        """Return so many numbers whose type has this letter in struct."""
        kind = np.dtype(f"<{letter}")
        start = self.reserve(count * kind.itemsize, what)
        numbers: list[Any] = np.frombuffer(self._data, kind, count, start).tolist()
        return numbers


def read_start(cursor: Cursor) -> tuple[int, int]:
    """Read the first 24 bytes; returns the number of tensors and of keys."""
    found = cursor.read_bytes(len(MAGIC), "the file's mark")
    if found != MAGIC:
        raise ValueError(f"{cursor.path} is not a GGUF file: it begins with {quote(found)}, not with {quote(MAGIC)}")
    version = cursor.read("I", "the version")
    if version and version & 0xFFFF == 0:
        raise cursor.fail("the file is big-endian; only little-endian files are read")
    if version != VERSION:
        raise cursor.fail(
            f"the version of the format is {version}, and {VERSION} is read: convert the model again with a newer "
            "llama.cpp"
        )
    num_tensors = cursor.read_count(LEAST_TENSOR, "the number of tensors")
    return num_tensors, cursor.read_count(LEAST_KEY, "the number of keys")


def read_named(cursor: Cursor, what: str, count: int, read: Callable[[Cursor], Value]) -> dict[str, Value]:
    """Return {name: what `read` returns} of so many keys, or tensors. Each has its name in front."""
    found: dict[str, Value] = {}
    for number in range(count):
        cursor.place = f"{what} {number} of {count}"
        name = cursor.read_text("its name", MOST_NAME)
        cursor.place = f"{what} {quote(name)}"
        if name in found:
            raise cursor.fail("it is there twice")
        found[name] = read(cursor)
    return found


def read_value(cursor: Cursor) -> Any:
    """Return a value of metadata: a number, a bool, a text, or a list of one of these."""
    kind = cursor.read("I", "its type")
    if kind == STRING:
        return cursor.read_text("its value")
    if kind in SCALARS:
        return cursor.read(SCALARS[kind], "its value")
    if kind != ARRAY:
        raise cursor.fail(f"its type is {kind}, which the format does not have")
    kind = cursor.read("I", "the type of its elements")
    if kind == STRING:
        count = cursor.read_count(8, "the number of its elements")
        return cursor.read_texts(count, "an element")
    if kind not in SCALARS:
        raise cursor.fail(f"its elements are of type {kind}; lists of lists are not read")
    letter = SCALARS[kind]
    count = cursor.read_count(struct.calcsize(letter), "the number of its elements")
    return cursor.read_numbers(letter, count, "its elements")


def read_alignment(metadata: Mapping[str, Any], path: Path) -> int:
    """Return of which number the place of each tensor is a multiple."""
    found = metadata.get("general.alignment", 32)
    if found not in [1 << bit for bit in range(3, 21)]:
        raise ValueError(f"{path}: general.alignment is {quote(found)}; it must be a power of two from 8 to {1 << 20}")
    return int(found)


def read_places(cursor: Cursor, count: int, alignment: int) -> dict[str, Place]:
    """Read the descriptions of the tensors, which end the header."""
    found = read_named(cursor, "tensor", count, partial(read_place, alignment=alignment))
    start = -(-cursor.at // alignment) * alignment
    last_end = start
    last_name = ""
    placed = {name: one._replace(offset=start + one.offset) for name, one in found.items()}
    for name, one in sorted(placed.items(), key=lambda item: item[1].offset):
        what = f"{cursor.path}: tensor {quote(name)}"
        if one.offset < last_end:
            raise ValueError(f"{what} begins at byte {one.offset}, within {quote(last_name)}")
        last_end = one.offset + one.num_bytes
        last_name = name
        if last_end > cursor.size:
            raise ValueError(f"{what} ends at byte {last_end}, and the file at {cursor.size}: it is cut short, or lies")
    return placed


def read_place(cursor: Cursor, alignment: int) -> Place:
    """Read the description of one tensor; its offset is counted from the first one."""
    num_dimensions = cursor.read("I", "the number of its dimensions")
    if not 1 <= num_dimensions <= MOST_DIMENSIONS:
        raise cursor.fail(f"it has {num_dimensions} dimensions; 1 to {MOST_DIMENSIONS} are read")
    dimensions = [cursor.read("Q", "a dimension") for _ in range(num_dimensions)]
    number = cursor.read("I", "its type")
    offset = cursor.read("Q", "its offset")
    sizes = load_sizes()
    if number not in sizes:
        raise cursor.fail(f"its type is number {number}, which the package gguf does not know")
    type_name, block, block_bytes = sizes[number]
    num_elements = 1
    for dimension in dimensions:
        num_elements *= dimension
    shape = tuple(reversed(dimensions))
    if dimensions[0] % block:
        raise cursor.fail(f"its rows have {dimensions[0]} elements, and the blocks of {type_name} have {block}")
    num_bytes = num_elements // block * block_bytes
    if num_elements == 0 or num_bytes > cursor.size:
        raise cursor.fail(f"its shape is {list(shape)}, of {num_bytes} bytes, and the file has {cursor.size}")
    if offset % alignment:
        raise cursor.fail(f"its offset is {offset}, which is no multiple of {alignment}")
    return Place(type_name, shape, cursor.path, offset, num_bytes)


@cache
def load_sizes() -> dict[int, tuple[str, int, int]]:
    """Return {number of a type: its name, the elements of a block, and the bytes of a block}."""
    gguf = import_gguf()
    return {int(kind): (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}


def import_gguf() -> Any:
    """Return the package gguf: it knows the types of tensors, and how to dequantise the rarer ones."""
    try:
        import gguf
    except ImportError as error:
        raise ValueError(f"reading a GGUF file needs the package gguf: pip install gguf ({error})") from error
    return gguf
