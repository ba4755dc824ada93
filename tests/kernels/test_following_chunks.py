"""With AHEAD, a program of decode attention asks for the first tile of its next chunk, and no output changes a bit."""

from typing import Any

import numpy as np
import pytest
import torch
from helpers.kernel_cases import HALF, AttentionCase, attention_case, vary_case

pytest.importorskip("triton")

from nanovllm.backends.gpu import decode_chunks, paged_decode
from nanovllm.backends.gpu.paged_decode import key_tile
from nanovllm.backends.gpu.triton_backend import TritonBackend
from nanovllm.backends.gpu.triton_shim import INTERPRETED

LINE = 128
"""Bytes that one prefetch brings."""

Chunk = tuple[int, int, int]
"""A sequence, and the first and the end key of its chunk."""


class Recorder:
    """Notes, for each program of the split in turn, the chunks that it attends and what it asks for after each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.attended: list[list[Chunk]] = []
        self.asked: list[list[tuple[Chunk, list[np.ndarray]]]] = []
        find_chunk = decode_chunks.find_chunk

        def read(found: Any) -> Chunk:
            seq, begin, end = (int(part.handle.data.item()) for part in found[:3])
            return seq, begin, end

        def start(PDL: Any) -> None:
            self.attended.append([])
            self.asked.append([])

        def attend(*args: Any) -> Any:
            found = find_chunk(*args)
            self.attended[-1].append(read(found))
            return found

        def look_ahead(*args: Any) -> Any:
            found = find_chunk(*args)
            self.asked[-1].append((read(found), []))
            return found

        monkeypatch.setattr(paged_decode, "find_chunk", attend)
        monkeypatch.setattr(paged_decode, "wait_for_predecessor", start)
        monkeypatch.setattr(decode_chunks, "find_chunk", look_ahead)
        monkeypatch.setattr(
            decode_chunks,
            "prefetch_lines",
            lambda pointers: self.asked[-1][-1][1].append(pointers.handle.data.flatten()),
        )


def list_lines(case: AttentionCase, part: torch.Tensor, chunk: Chunk, head: int) -> set[int]:
    """Return the addresses, LINE bytes apart, of the first tile of a chunk in the keys or the values of a head."""
    block_size, _, head_dim = part.shape[1:]
    seq, begin, end = chunk
    # A chunk without keys has no block: block 0 stands for it.
    block = int(case.inputs.block_tables[seq, begin // block_size]) if begin < end else 0
    tile = key_tile(head_dim, block_size, part.element_size())
    first = begin % block_size
    rows = part[block, first : first + tile, head]
    return {row.data_ptr() + byte for row in rows for byte in range(0, head_dim * part.element_size(), LINE)}


@pytest.mark.skipif(not INTERPRETED, reason="a compiled kernel shows no addresses")
@pytest.mark.parametrize(
    ("head_dim", "block_size", "dtype", "kv_dtype", "window"),
    [
        (128, 64, HALF, HALF, None),
        (64, 64, torch.float32, torch.float32, 40),
        (128, 64, HALF, torch.int8, None),
        (256, 64, torch.float32, torch.int8, 300),
    ],
)
def test_a_program_asks_for_the_first_tile_of_its_next_chunk(
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    window: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After its last chunk it asks for that one again. Some programs have no chunk, and some sequences no keys."""
    monkeypatch.setattr(paged_decode, "num_multiprocessors", lambda device: 2)
    lengths = [1, block_size - 1, 0, 500, 0, block_size + 1, 90]
    case = attention_case([1] * len(lengths), lengths, head_dim, 2, block_size, dtype, kv_dtype=kv_dtype)
    if window is not None:
        case = vary_case(case, window, None, False)
    expected = case.attend(TritonBackend())
    usual = paged_decode.split_config
    monkeypatch.setattr(paged_decode, "split_config", lambda *sizes: usual(*sizes) | {"AHEAD": True})
    recorder = Recorder(monkeypatch)
    assert torch.equal(case.attend(TritonBackend()), expected)
    programs = [pair for pair in zip(recorder.attended, recorder.asked, strict=True) if pair[0]]
    assert max(len(attended) for attended, _ in programs) > 2
    heads = set()
    for attended, asked in programs:
        assert [chunk for chunk, _ in asked] == [*attended[1:], attended[-1]]
        for head in range(2):
            wanted = [[list_lines(case, part, chunk, head) for part in case.cache[:2]] for chunk, _ in asked]
            if wanted == [[set(lines.tolist()) for lines in parts] for _, parts in asked]:
                heads.add(head)
                break
        else:
            pytest.fail(f"the lines are not those of one head: {asked}")
    assert heads == {0, 1}
