"""Headers of GGUF files: what they say is read, and a damaged file is refused by what is wrong, and where."""

import random
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.gguf_models import damage
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanovllm.features.gguf.reader import GgufFile

gguf = pytest.importorskip("gguf")

METADATA: dict[str, Any] = {
    "general.name": "ä name",
    "llama.block_count": 2,
    "llama.rope.freq_base": 1e6,
    "tokenizer.ggml.tokens": ["a", "▁b", ""],
    "tokenizer.ggml.scores": [0.5, -1.0, 0.0],
    "tokenizer.ggml.add_bos_token": True,
}
TENSORS = {
    "token_embd.weight": np.arange(96, dtype=np.float32).reshape(3, 32),
    "output_norm.weight": np.ones(32, np.float32),
    "blk.0.attn_q.weight": np.ones((2, 64), np.float16),
}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def describe(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    """The bytes that describe a tensor; the shape's first number is that of the columns."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def header(*, tensors: tuple[bytes, ...] = (), keys: tuple[bytes, ...] = (), version: int = 3) -> bytes:
    start = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys))
    return start + b"".join(keys) + b"".join(tensors)


def write(path: Path, data: bytes, body: int = 4096) -> Path:
    """Write a header and a body of zeros."""
    path.write_bytes(data + bytes(-len(data) % 32 + body))
    return path


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that the package gguf wrote."""
    path = tmp_path_factory.mktemp("gguf") / "sound.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in METADATA.items():
        kind = gguf.GGUFValueType.get_type(value)
        own = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
        writer.add_key_value(key, value, kind, own)
    for name, values in TENSORS.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_what_the_package_wrote_is_read(sound: Path) -> None:
    found = GgufFile(sound)
    assert found.metadata == {"general.architecture": "llama", **METADATA}
    data = sound.read_bytes()
    for name, values in TENSORS.items():
        place = found.tensors[name]
        assert (place.type_name, place.shape) == ("F16" if values.dtype == np.float16 else "F32", values.shape)
        assert data[place.offset : place.offset + place.num_bytes] == values.tobytes()


def test_any_of_several_files_reads_all(tmp_path: Path) -> None:
    paths = [tmp_path / f"m-{number:05d}-of-00002.gguf" for number in (1, 2)]
    for number, path in enumerate(paths):
        write(path, header(tensors=(describe(f"t{number}", (8,)),), keys=split_keys(number, 2, 2)))
    for path in paths:
        found = GgufFile(path)
        assert (found.path, found.files) == (paths[0], paths)
        assert {name: place.file for name, place in found.tensors.items()} == {"t0": paths[0], "t1": paths[1]}


def split_keys(number: int, count: int, num_tensors: int) -> tuple[bytes, ...]:
    values = {
        "split.no": ("H", 2, number),
        "split.count": ("H", 2, count),
        "split.tensors.count": ("i", 5, num_tensors),
    }
    return tuple(text(key) + struct.pack(f"<I{letter}", kind, value) for key, (letter, kind, value) in values.items())


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (None, "lacks 1 of 2 files: m-00002-of-00002.gguf"),
        (header(tensors=(describe("t0", (8,)),), keys=split_keys(1, 2, 2)), "'t0' is in another file too"),
        (header(tensors=(describe("t1", (8,)),), keys=split_keys(1, 3, 2)), "split.count is 3"),
        (header(tensors=(describe("t1", (8,)),), keys=split_keys(0, 2, 2)), "split.no is 0"),
        (header(tensors=(describe("t1", (8,)),)), "split.no is None"),
        (header(keys=split_keys(1, 2, 2)), "split.tensors.count is 2"),
        (
            header(
                tensors=(describe("t1", (8,)),),
                keys=(*split_keys(1, 2, 2), text("general.architecture") + struct.pack("<I", 8) + text("gpt2")),
            ),
            "is not what m-00001-of-00002.gguf says",
        ),
    ],
)
def test_files_that_lack_or_contradict_each_other_are_refused(tmp_path: Path, second: bytes | None, words: str) -> None:
    first = tmp_path / "m-00001-of-00002.gguf"
    architecture = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    write(first, header(tensors=(describe("t0", (8,)),), keys=(*split_keys(0, 2, 2), architecture)))
    if second is not None:
        write(tmp_path / "m-00002-of-00002.gguf", second)
    with pytest.raises(ValueError, match=words):
        GgufFile(first)


KEY = text("k")
DAMAGED = {
    "empty": (b"", "the file's mark"),
    "another format": (b"PK\3\4" + bytes(40), "is not a GGUF file"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "version 1": (b"GGUF" + struct.pack("<III", 1, 0, 0), "version of the format is 1"),
    "version 2": (header(version=2), "version of the format is 2"),
    "version 4": (header(version=4), "version of the format is 4"),
    "many tensors": (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "number of tensors is 9223372036854775808"),
    "many keys": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**40), "number of keys is"),
    "a key of gigabytes": (header(keys=(struct.pack("<Q", 2**33),)), "its name has 8589934592 bytes"),
    "a text of gigabytes": (header(keys=(KEY + struct.pack("<IQ", 8, 2**33),)), "key 'k', byte .* has 8589934592"),
    "a list of gigabytes": (header(keys=(KEY + struct.pack("<IIQ", 9, 4, 2**33),)), "number of its elements is"),
    "texts of gigabytes": (
        header(keys=(KEY + struct.pack("<IIQQ", 9, 8, 1, 2**40),)),
        "key 'k', byte .* an element ends at byte 1099511",
    ),
    "a list of lists": (header(keys=(KEY + struct.pack("<IIQ", 9, 9, 1),)), "lists of lists"),
    "a type of values": (header(keys=(KEY + struct.pack("<I", 77),)), "its type is 77"),
    "a key twice": (header(keys=(KEY + struct.pack("<IB", 0, 1),) * 2), "key 'k', byte .* twice"),
    "no UTF-8": (header(keys=(struct.pack("<Q", 1) + b"\xff" + struct.pack("<IB", 0, 1),)), "no UTF-8"),
    "no alignment": (
        header(keys=(text("general.alignment") + struct.pack("<II", 4, 0),)),
        "general.alignment is 0",
    ),
    "odd alignment": (header(keys=(text("general.alignment") + struct.pack("<II", 4, 48),)), "alignment is 48"),
    "a tensor twice": (header(tensors=(describe("t", (8,)),) * 2), "tensor 't', byte .* twice"),
    "no dimensions": (header(tensors=(describe("t", ()),)), "it has 0 dimensions"),
    "many dimensions": (header(tensors=(describe("t", (1,) * 5),)), "it has 5 dimensions"),
    "a shape of 2^63": (header(tensors=(describe("t", (2**63, 2**63)),)), "tensor 't', byte .* its shape is"),
    "a shape whose bytes wrap around": (header(tensors=(describe("t", (2**62, 4)),)), "its shape is"),
    "no elements": (header(tensors=(describe("t", (0, 4)),)), "its shape is"),
    "a type": (header(tensors=(describe("t", (8,), kind=4),)), "its type is number 4"),
    "a part of a block": (header(tensors=(describe("t", (33,), kind=8),)), "the blocks of Q8_0 have 32"),
    "an offset beyond the end": (header(tensors=(describe("t", (8,), offset=2**40),)), "it is cut short"),
    "an offset of 2^64": (header(tensors=(describe("t", (8,), offset=2**64 - 32),)), "it is cut short"),
    "an odd offset": (header(tensors=(describe("t", (8,), offset=4),)), "no multiple of 32"),
    "two tensors in one place": (header(tensors=(describe("a", (16,)), describe("b", (8,)))), "within 'a'"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused_by_what_is_wrong_and_where(tmp_path: Path, name: str) -> None:
    data, words = DAMAGED[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data) if not data else write(path, data)
    with pytest.raises(ValueError, match=words) as caught:
        GgufFile(path)
    assert str(path) in str(caught.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing.gguf"):
        with pytest.raises(ValueError, match=str(path)):
            GgufFile(path)


def read_or_refuse(path: Path, data: bytes) -> bool:
    """Return whether a file is refused. Whatever it holds, nothing but a ValueError may come."""
    path.write_bytes(data)
    try:
        found = GgufFile(path)
    except ValueError:
        return True
    assert all(place.offset + place.num_bytes <= len(data) for place in found.tensors.values())
    return False


def test_two_thousand_damaged_files_are_read_or_refused_in_little_time_and_memory(sound: Path, tmp_path: Path) -> None:
    head = sound.read_bytes()
    num_refused = 0
    tracemalloc.start()
    for seed in range(2000):
        rng = random.Random(seed)
        start = time.perf_counter()
        num_refused += read_or_refuse(tmp_path / "damaged.gguf", damage(head, rng))
        assert time.perf_counter() - start < 10, seed
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20
    assert num_refused > 1000


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200), cut=st.integers(0, 400))
def test_any_bytes_behind_any_beginning_are_read_or_refused(sound: Path, tmp_path: Path, data: bytes, cut: int) -> None:
    read_or_refuse(tmp_path / "any.gguf", sound.read_bytes()[:cut] + data)
