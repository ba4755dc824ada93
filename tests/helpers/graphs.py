"""CUDA graphs without CUDA."""

from collections import Counter

from nanovllm.backends.gpu.cuda_graphs import CudaGraphs


class StandInGraphs(CudaGraphs):
    """Runs each part of a step, on the graph's padded inputs, instead of replaying its capture."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.sizes_run = set()
        self.parts_run = Counter()

    def replay(self, part, size):
        self.sizes_run.add(size)
        self.parts_run[part] += 1
        if part == "layers":
            self.layers = self._runner.forward_decodes(size)
            return self.layers
        return self._runner.sample_decodes(*self.layers)
