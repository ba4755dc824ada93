"""CUDA graphs of decode steps: the host launches a step once, instead of a few hundred kernels."""

import bisect
import functools
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from tqdm import tqdm

from nanovllm.backends.steps import StepPart, Steps
from nanovllm.engine.plan import StepPlan
from nanovllm.utils.progress import hide_unless

if TYPE_CHECKING:
    from nanovllm.runner.model_runner import ModelRunner

T = TypeVar("T")

MOST_SEQS = 1024
"""The most sequences of a graph. Up to here a start captures 45 sizes; up to 4,096 sequences it would capture 141.

A larger step runs eagerly. It has as many launches as a small one, and the device has far more work for each.
"""


def graph_batch_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes to capture: 1, 2, 4, 8, 16, 24, 32, every 16 to 256, every 32 above, and the largest.

    Every batch of 1..max_num_seqs, but of at most MOST_SEQS, then finds a graph. Padding is less than half of it, and
    from 16 on at most 31 rows.
    """
    largest = min(max_num_seqs, MOST_SEQS)
    sizes = [1, 2, 4, 8, 16, 24, 32, *range(48, 257, 16), *range(288, largest + 1, 32)]
    return sorted({size for size in sizes if size < largest} | {largest})


def smallest_that_holds(sizes: list[int], num_seqs: int) -> int:
    """Return the smallest of the ascending sizes that is at least num_seqs; IndexError if there is none."""
    return sizes[bisect.bisect_left(sizes, num_seqs)]


@functools.cache
def _capture_stream(device: int) -> Any:
    """Return the stream on which all graphs of a device are captured.

    It is always the same, because cuBLAS keeps a workspace for each stream it has seen, for good. It is our own,
    because torch's default for captures stays on the first device that the process captured on.
    """
    return torch.cuda.Stream(device)


class CudaGraphs(Steps):
    """Decode steps of each batch size as CUDA graphs, from the staging buffer to hidden states and sampled tokens.

    CUDA calls it a capture when a step is recorded as a graph.

    A step is two graphs, the model's and the sampler's. The second is left out where logits are edited or
    log-probabilities wanted.

    A graph of size n reads its inputs from the first values of the staging buffer, whose address never changes: the
    first arrays of a plan that was padded to n. All graphs share one pool of memory. They are captured largest first,
    so that the smaller ones fit into what the largest has taken. They may share it because only one runs at a time, and
    its outputs are read before (in stream order) the next one runs.
    """

    def __init__(self, runner: "ModelRunner") -> None:
        """None is captured yet.

        Args:
            runner: the runner whose steps become graphs. They read its weights and its cache where these lie now.
        """
        # No strong reference: a cycle would keep a dropped engine's memory, and its graphs beyond its process group.
        self._runner: ModelRunner = weakref.proxy(runner)
        self.sizes = graph_batch_sizes(runner.config.max_num_seqs)
        self.most_seqs = self.sizes[-1]
        self._pool: Any = None  # torch's pool handles have no public type
        self._graphs: dict[tuple[StepPart, int], tuple[torch.cuda.CUDAGraph, Any]] = {}
        """{part and size of a step: its graph, and the tensors that the graph writes}."""

    def capture(self, sizes: list[int] | None = None, show_progress: bool = False) -> None:
        """Capture the graphs of sizes, by default of all. All inputs are padding: no sequence is touched."""
        sizes = sorted(sizes or self.sizes, reverse=True)
        with self._runner.backend.on_device(), torch.inference_mode():
            stream = _capture_stream(torch.cuda.current_device())
            current = torch.cuda.current_stream()
            for size in tqdm(sizes, desc="Capturing graphs", **hide_unless(show_progress)):
                self._runner.staging.send(StepPlan.make_padding(size, self._runner.device_rows.padding_row).arrays())
                stream.wait_stream(current)
                with torch.cuda.stream(stream):
                    self.run_once(size)  # compiles kernels and warms libraries up, outside the capture
                torch.cuda.synchronize()
                for part, work in self._list_parts(size):
                    self._capture((part, size), stream, work)
            torch.cuda.synchronize()

    def run_once(self, size: int) -> None:
        """Run both parts of a step of that size eagerly, on what the staging buffer holds."""
        for _, work in self._list_parts(size):
            work()

    def _list_parts(self, size: int) -> Iterator[tuple[StepPart, Callable[[], Any]]]:
        """Yield each part of a decode step of that size, and what runs it. The caller runs one before it takes the
        next."""
        runner = self._runner
        results: list[Any] = []

        def run_layers() -> Any:
            results[:] = runner.forward_decodes(size)
            return tuple(results)

        yield "layers", run_layers
        if runner.has_head:
            inputs, hidden = results
            yield "head", partial(runner.sample_decodes, inputs, hidden)

    def _capture(self, key: tuple[StepPart, int], stream: Any, work: Callable[[], T]) -> None:
        """Capture some work. Each replay writes its results anew."""
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads, NCCL's and those of a second engine, may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            result = work()
        self._pool = self._pool or graph.pool()
        self._graphs[key] = graph, result

    def pad(self, plan: StepPlan) -> StepPlan:
        """Return a plan of decodes, padded to the size of the smallest graph that holds it."""
        return plan.pad(smallest_that_holds(self.sizes, plan.num_seqs), self._runner.device_rows.padding_row)

    def replay(self, part: StepPart, size: int) -> Any:
        graph, result = self._graphs[part, size]
        graph.replay()
        return result

    def release(self) -> None:
        """Free the graphs. This comes before the memory they point into is freed, and before a process group ends."""
        for graph, _ in self._graphs.values():
            graph.reset()  # now, even if an exception's traceback still holds it
        self._graphs.clear()
        self._pool = None
