"""CUDA graphs without CUDA."""

from nanovllm.runner.cuda_graphs import CudaGraphs


class StandInGraphs(CudaGraphs):
    """Runs the decode step on the graph's padded inputs instead of replaying its capture."""

    def replay(self, size):
        self.decoded = self.decode(self.inputs(size))
        return self.decoded

    def replay_sampler(self, size):
        return self.sample(*self.decoded)
