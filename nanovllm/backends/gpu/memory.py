"""The memory of a GPU: what the largest step and the graphs take, and what is left for the KV cache."""

import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nanovllm.backends.gpu.cuda_graphs import CudaGraphs
from nanovllm.engine.plan import StepPlan

if TYPE_CHECKING:
    from nanovllm.runner.model_runner import ModelRunner

EDIT_BYTES = 5
"""For each logit that is edited: itself in float32, and its place in a mask."""
COUNT_BYTES = 4
"""For each token of the vocabulary and each sequence: how often the sequence has it, for penalties."""
PROCESS_BYTES = 2048
"""For each token of the vocabulary, with logprobs_mode="processed_logprobs": the copies of the rows that are processed
at a time, 16 bytes for each of 64 rows, and 64 for each of 16 rows with filters."""
GRAPH_NODES_BYTES = 4 << 20
"""Allowance for one captured graph's own nodes: a few hundred kernels' parameters."""


@dataclass(frozen=True)
class GpuMemory:
    """The uses of a GPU's memory, in bytes.

    Attributes:
        total: all memory of the GPU.
        others: the bytes that are held by other processes, and by CUDA itself in this one.
        weights: the bytes of parameters and tables.
        activations: the most that a step of max_num_batched_tokens adds, sampling included.
        graphs: the bytes that the captured graphs keep.
        states: the bytes of the states of all rows, in models that keep a state for each.
    """

    total: int
    others: int
    weights: int
    activations: int
    graphs: int
    states: int = 0

    def left_for_cache(self, utilization: float, ranks: int = 1) -> int:
        """Return the bytes that are left for one rank's cache; negative if the rest takes more than it may.

        Args:
            utilization: the part of the GPU's memory that may be used, from 0 to 1.
            ranks: how many share the GPU. `others` has their weights, but not the rest.
        """
        rest = self.activations + self.graphs + self.states
        left = int(self.total * utilization) - self.others - self.weights - ranks * rest
        return left // ranks

    def describe(self) -> str:
        """Return all uses in GiB, as one line for the log."""
        others = {"CUDA and other processes": self.others}
        parts = {"weights": self.weights, "activations": self.activations, "graphs": self.graphs, **others}
        if self.states:
            parts["states"] = self.states
        return ", ".join(f"{name} {value / 2**30:.2f} GiB" for name, value in parts.items())


def measure_memory(runner: "ModelRunner") -> GpuMemory:
    """Measure how much of the GPU the largest step and the graphs take, with a cache of a single block."""
    gc.collect()  # an engine that was dropped without close() may still hold its cache
    torch.cuda.empty_cache()
    weights = torch.cuda.memory_allocated(runner.device)
    runner.caches = runner.make_caches(1)
    states = runner.count_state_bytes()
    activations = _measure_largest_step(runner) - weights - states
    graphs = _measure_graphs(runner) if runner.config.use_graphs else 0
    runner.caches = []
    torch.cuda.empty_cache()
    runner.parallel.minimum(0)  # waits until ranks on the same GPU have given back their activations, too
    free, total = torch.cuda.mem_get_info(runner.device)
    others = total - free - torch.cuda.memory_reserved(runner.device)
    return GpuMemory(total, others, weights, activations, graphs, states)


def _measure_largest_step(runner: "ModelRunner") -> int:
    """Return the most bytes that are allocated at any time of the largest step, weights included."""
    config = runner.config
    torch.cuda.reset_peak_memory_stats(runner.device)
    plan = StepPlan.largest(
        config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len, config.num_speculative_tokens
    )
    # Padding rows store nothing and read block 0: the shapes are real, the values are not.
    plan.rows[:] = runner.device_rows.padding_row
    runner.launch(plan).result()
    num_bytes: int = torch.cuda.max_memory_allocated(runner.device)
    if runner.parallel.rank == 0:
        num_edited = min(config.max_num_seqs * (1 + config.num_speculative_tokens), config.max_num_batched_tokens)
        edits = EDIT_BYTES * num_edited + COUNT_BYTES * config.max_num_seqs
        if config.logprobs_mode == "processed_logprobs":
            edits += PROCESS_BYTES
        num_bytes += edits * runner.hf_config.vocab_size
    return num_bytes


def _measure_graphs(runner: "ModelRunner") -> int:
    """Return about how many bytes the captured graphs will keep: captures the two largest, and lets go of them."""
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info(runner.device)[0]
    trial = CudaGraphs(runner)
    trial.capture(trial.sizes[-2:])
    taken = before - torch.cuda.mem_get_info(runner.device)[0]  # below 0 if another rank has freed more meanwhile
    per_graph = max(taken, 0) // len(trial.sizes[-2:])
    trial.release()
    # The largest pays for the pool that all share; each of the others adds its own nodes.
    return 2 * per_graph + len(trial.sizes) * GRAPH_NODES_BYTES
