"""CUDA graphs of decode steps: the host launches a step once, instead of a few hundred kernels."""

import bisect
import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from nanovllm.engine.plan import NUM_PER_SEQ, StepPlan, make_padding

T = TypeVar("T")
Half = Literal["model", "sampler"]
"""The halves of a step. They are repeated apart, because logits may be edited between them."""
HEAD = NUM_PER_SEQ + 1
"""How many rows a graph's inputs have: the arrays of a plan with one element per sequence, and token_ids."""
MOST_SEQS = 1024
"""The most sequences of a captured step. So a start captures 45 sizes at most; 4,096 sequences would make it 141.

A larger step runs eagerly: it has as many launches as a small one, beside far more work for the device.
"""
Decoded = tuple[Tensor, Tensor, Tensor]
"""Of n decodes: hidden states [n, hidden], rows int32 [n], and positions int32 [n] of the tokens to sample."""
Decode = Callable[[Tensor], Decoded]
"""Runs the model on inputs int32 [HEAD, n]: see `ModelRunner.decode`."""
Sample = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Samples from what was decoded; returns token ids int32 [n]."""


def graph_batch_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes to capture: 1, 2, 4, 8, 16, 24, 32, every 16 to 256, every 32 above, and the largest.

    Every batch of 1..max_num_seqs, but of at most MOST_SEQS, then finds a graph. Padding is less than half of it, and
    from 16 on at most 31 rows.
    """
    largest = min(max_num_seqs, MOST_SEQS)
    sizes = [1, 2, 4, 8, 16, 24, 32, *range(48, 257, 16), *range(288, largest + 1, 32)]
    return sorted({size for size in sizes if size < largest} | {largest})


def smallest_that_holds(sizes: list[int], num_seqs: int) -> int:
    """Return the smallest of the ascending sizes that is at least num_seqs (RuntimeError if there is none)."""
    index = bisect.bisect_left(sizes, num_seqs)
    if index == len(sizes):
        raise RuntimeError(f"no graph holds {num_seqs} sequences; the largest is {sizes[-1]}")
    return sizes[index]


@functools.cache
def _capture_stream(device: int) -> Any:
    """Return the stream on which all graphs of a device are captured.

    It is always the same, because cuBLAS keeps a workspace for each stream it has seen, for good. It is our own,
    because torch's default for captures stays on the first device that the process captured on.
    """
    return torch.cuda.Stream(device)


class CudaGraphs:
    """Decode steps of each batch size as CUDA graphs, from the staging buffer to hidden states and sampled tokens.

    A step is two graphs, the model's and the sampler's. The second is left out where logits are edited or
    log-probabilities wanted.

    A graph of size n reads its inputs from the first HEAD * n values of the staging buffer, whose address never
    changes: the first arrays of a plan that was padded to n. All graphs share one pool of memory. They are captured
    largest first, so that the smaller ones fit into what the largest has taken. They may share it because only one runs
    at a time, and its outputs are read before (in stream order) the next one runs.
    """

    def __init__(self, buffer: Tensor, max_num_seqs: int, padding_row: int) -> None:
        self._buffer = buffer
        self.sizes = graph_batch_sizes(max_num_seqs)
        self.most_seqs = self.sizes[-1]
        self.padding_row = padding_row
        self._pool: Any = None  # torch's pool handles have no public type
        self._graphs: dict[tuple[Half, int], tuple[torch.cuda.CUDAGraph, Any]] = {}
        """{half and size of a step: its graph, and the tensors that the graph writes}."""

    def capture(
        self, decode: Decode, sample: Sample | None, sizes: list[int] | None = None, show_progress: bool = False
    ) -> None:
        """Capture the graphs of sizes, by default of all. All inputs are padding: no sequence is touched."""
        stream = _capture_stream(torch.cuda.current_device())
        current = torch.cuda.current_stream()
        for size in tqdm(sorted(sizes or self.sizes, reverse=True), desc="Capturing graphs", disable=not show_progress):
            inputs = self.inputs(size)
            inputs.copy_(torch.from_numpy(make_padding(size, self.padding_row)))
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                decoded = decode(inputs)  # compiles kernels and warms libraries up, outside the capture
                if sample is not None:
                    sample(*decoded)
            torch.cuda.synchronize()
            decoded = self._capture(("model", size), stream, functools.partial(decode, inputs))
            if sample is not None:
                self._capture(("sampler", size), stream, functools.partial(sample, *decoded))
        torch.cuda.synchronize()

    def _capture(self, key: tuple[Half, int], stream: Any, work: Callable[[], T]) -> T:
        """Capture some work; returns its result, which each replay writes anew."""
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads, NCCL's and those of a second engine, may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            result = work()
        self._pool = self._pool or graph.pool()
        self._graphs[key] = graph, result
        return result

    def pad(self, plan: StepPlan) -> StepPlan:
        """Return a plan of decodes, padded to the size of the smallest graph that holds it."""
        return plan.pad(smallest_that_holds(self.sizes, plan.num_seqs), self.padding_row)

    def inputs(self, size: int) -> Tensor:
        """Return the part of the staging buffer that a graph of that size reads: int32 [HEAD, size]."""
        return self._buffer[: HEAD * size].view(HEAD, size)

    def run(self, half: Half, size: int, work: Callable[[], Any]) -> Any:
        """Run half a step of that size: the model on what the staging buffer holds, the sampler on its results.

        Returns what `work` returned when it was captured: it is written anew, and lives until the next replay.
        """
        graph, result = self._graphs[half, size]
        graph.replay()
        return result

    def release(self) -> None:
        """Free the graphs. This comes before the memory they point into is freed, and before a process group ends."""
        for graph, _ in self._graphs.values():
            graph.reset()  # now, even if an exception's traceback still holds it
        self._graphs.clear()
        self._pool = None
