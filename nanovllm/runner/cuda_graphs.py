"""Capture and replay of decode steps: one launch instead of a few hundred."""

import bisect
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from nanovllm.engine.plan import NUM_PER_SEQ

logger = logging.getLogger(__name__)

HEAD = NUM_PER_SEQ + 1
DecodeStep = Callable[[Tensor], tuple[Tensor, Tensor]]
"""A plan of n decodes as far as token_ids, int32 [HEAD, n] -> (sampled ids int32 [n], hidden states [n, hidden])."""


def graph_batch_sizes(max_num_seqs: int) -> list[int]:
    """The batch sizes to capture: 1, 2, 4, 8, 16, 24, 32, every 16 to 256, every 32 above, and the largest itself.

    Every batch of 1..max_num_seqs then finds a graph, and pads it by less than half, from 16 on by at most 31 rows.
    """
    sizes = [1, 2, 4, 8, 16, 24, 32, *range(48, 257, 16), *range(288, max_num_seqs + 1, 32)]
    return sorted({size for size in sizes if size < max_num_seqs} | {max_num_seqs})


def smallest_that_holds(sizes: list[int], num_seqs: int) -> int:
    """The smallest of the ascending sizes that is at least num_seqs (RuntimeError if there is none)."""
    index = bisect.bisect_left(sizes, num_seqs)
    if index == len(sizes):
        raise RuntimeError(f"no graph holds {num_seqs} sequences; the largest is {sizes[-1]}")
    return sizes[index]


@functools.cache
def _capture_stream(device: int) -> Any:
    """The stream on which all graphs of a device are captured.

    Always the same, because cuBLAS keeps a workspace for each stream it has seen, for good; and our own, because
    torch's default for captures stays on the first device that the process captured on.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class CudaGraphs:
    """Decode steps of each batch size as CUDA graphs, from `buffer` to tokens and hidden states.

    A graph of size n reads its inputs from the first HEAD * n values of the staging buffer, whose address never
    changes: the first arrays of a plan that was padded to n. All graphs share one pool of memory, captured largest
    first so that the smaller ones fit into what the largest has taken; only one runs at a time, and its outputs are
    read before (in stream order) the next one runs.
    """

    def __init__(self, buffer: Tensor, max_num_seqs: int, padding_row: int) -> None:
        self._buffer = buffer
        self.sizes = graph_batch_sizes(max_num_seqs)
        self.padding_row = padding_row
        self._pool: Any = None  # torch's pool handles have no public type
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}

    def capture(self, decode: DecodeStep, sizes: list[int] | None = None, show_progress: bool = False) -> None:
        """Capture the graphs of sizes, all by default. Every input is padding: nothing live is read or written."""
        stream, current = _capture_stream(torch.cuda.current_device()), torch.cuda.current_stream()
        for size in tqdm(sorted(sizes or self.sizes, reverse=True), desc="Capturing graphs", disable=not show_progress):
            inputs = self.inputs(size)
            inputs.zero_()
            inputs[0], inputs[2] = self.padding_row, 1  # rows, num_scheduled
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                decode(inputs)  # compiles kernels and warms libraries up, outside the capture
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Other threads, as NCCL's and those of a second engine, may call CUDA meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                token_ids, hidden = decode(inputs)
            self._pool = self._pool or graph.pool()
            self._graphs[size] = graph, token_ids, hidden
        torch.cuda.synchronize()

    def inputs(self, size: int) -> Tensor:
        """Where a graph of that size reads: int32 [HEAD, size]."""
        return self._buffer[: HEAD * size].view(HEAD, size)

    def replay(self, size: int) -> tuple[Tensor, Tensor]:
        """Run the graph of that size on what the staging buffer holds; its outputs live until the next replay."""
        graph, token_ids, hidden = self._graphs[size]
        graph.replay()
        return token_ids, hidden

    def release(self) -> None:
        """Free the graphs: before the memory they point into goes, and before a process group does."""
        for graph, *_ in self._graphs.values():
            graph.reset()  # now, even if an exception's traceback still holds it
        self._graphs.clear()
        self._pool = None
