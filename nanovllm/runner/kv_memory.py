"""Decides how many blocks the KV cache gets."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nanovllm.config import ResolvedConfig
from nanovllm.utils.integers import ceil_div
from nanovllm.utils.memory import cpu_cache_budget, free_memory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GpuMemory:
    """The uses of a GPU's memory, in bytes.

    Attributes:
        total: all memory of the GPU.
        others: held by other processes, and by CUDA itself in this one.
        weights: parameters and tables.
        activations: the most that a step of max_num_batched_tokens adds, sampling included.
        graphs: kept by the captured graphs.
        states: the states of all rows, in models that keep one for each.
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


def check_free_memory(num_bytes: int, device: torch.device, what: str, advice: str) -> None:
    """Raise a ValueError if `what`, which takes num_bytes, is larger than the device's free memory."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        free -= torch.cuda.memory_allocated(device)
    else:
        free = free_memory()
    if num_bytes > free:
        raise ValueError(
            f"{what} would take {num_bytes / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB are free: {advice}"
        )


def count_blocks(
    config: ResolvedConfig,
    block_bytes: int,
    state_bytes: int,
    device: torch.device,
    ranks: int,
    measure: Callable[[], GpuMemory],
) -> int:
    """Return how many blocks a rank's cache gets: num_kvcache_blocks, else as many as kvcache_memory_bytes hold.

    If the user gives neither, the cache gets all that is left of a GPU. On a CPU, which other programs use too, it gets
    a quarter of the free memory, at most 4 GiB, and at most what max_num_seqs sequences of max_model_len need.

    Args:
        state_bytes: the bytes of the states of all rows on one rank; 0 for models without states.
        ranks: how many share the device.
        measure: measures a GPU's memory; called only if it is needed.

    Raises:
        ValueError: the cache could not hold one sequence of max_model_len, or takes more than the device has.
    """

    def check_fits(num_bytes: int, option: str) -> None:
        check_free_memory(ranks * num_bytes, device, "the KV cache", f"lower {option}")

    check_free_memory(ranks * state_bytes, device, f"the states of {config.max_num_seqs} rows", "lower max_num_seqs")
    if config.num_kvcache_blocks is not None:
        check_pool(config.num_kvcache_blocks, config.block_size, config.max_model_len)
        check_fits(config.num_kvcache_blocks * block_bytes, "num_kvcache_blocks")
        return config.num_kvcache_blocks
    if (budget := config.kvcache_memory_bytes) is not None:
        check_fits(budget, "kvcache_memory_bytes")
    elif device.type == "cuda":
        memory = measure()
        logger.info("GPU memory: %s", memory.describe())
        budget = memory.left_for_cache(config.gpu_memory_utilization, ranks)
    else:
        most = config.max_num_seqs * config.max_blocks_per_seq * block_bytes
        room = cpu_cache_budget() // ranks
        budget = min(max(room - state_bytes, room // 2), most)
    if not block_bytes:  # a stage of a pipeline whose layers have no keys and values: the other stages decide
        return config.max_num_seqs * config.max_blocks_per_seq
    return blocks_that_fit(budget, block_bytes, config.block_size, config.max_model_len)


def blocks_that_fit(num_bytes: int, block_bytes: int, block_size: int, max_model_len: int) -> int:
    """Return how many blocks the bytes hold.

    Raises:
        ValueError: they cannot hold one sequence of max_model_len. The message names the longest that they can hold.
    """
    num_blocks = max(num_bytes // block_bytes, 0)
    check_pool(num_blocks, block_size, max_model_len)
    return num_blocks


def check_pool(num_blocks: int, block_size: int, max_model_len: int) -> None:
    """Raise a ValueError unless the blocks hold one sequence of max_model_len."""
    needed = ceil_div(max_model_len, block_size)
    if num_blocks < needed:
        advice = f"set max_model_len to at most {num_blocks * block_size}" if num_blocks else "nothing would fit"
        raise ValueError(
            f"the KV cache has {num_blocks} blocks of {block_size} tokens, and one sequence of "
            f"max_model_len={max_model_len} needs {needed}: {advice}, or give it more memory "
            "(kvcache_memory_bytes, num_kvcache_blocks, gpu_memory_utilization)"
        )
