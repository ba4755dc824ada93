"""CUDA graphs without CUDA."""

from collections import Counter

from nanovllm.backends.gpu.cuda_graphs import CudaGraphs


class StandInGraphs(CudaGraphs):
    """Runs each part of a step, on the graph's padded inputs, instead of replaying its capture."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.sizes_run = set()
        self.parts_run = Counter()

    def run(self, part, size, work):
        self.sizes_run.add(size)
        self.parts_run[part] += 1
        return work()
