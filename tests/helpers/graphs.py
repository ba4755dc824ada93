"""CUDA graphs without CUDA."""

from collections import Counter

from nanovllm.backends.gpu.cuda_graphs import CudaGraphs


class StandInGraphs(CudaGraphs):
    """Runs each half of a step, on the graph's padded inputs, instead of replaying its capture."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.sizes_run = set()
        self.halves_run = Counter()

    def run(self, half, size, work):
        self.sizes_run.add(size)
        self.halves_run[half] += 1
        return work()
