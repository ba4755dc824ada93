"""How much memory the KV cache may have."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nanovllm.config import ResolvedConfig
from nanovllm.utils.machine import free_memory

logger = logging.getLogger(__name__)

CPU_CACHE_LIMIT = 4 << 30


@dataclass(frozen=True)
class GpuMemory:
    """Where a GPU's memory goes, in bytes.

    Attributes:
        total: of the card.
        others: what other processes hold, and CUDA itself in this one.
        weights: parameters and tables.
        activations: the most that a step of max_num_batched_tokens adds, sampling included.
        graphs: what the captured graphs keep.
    """

    total: int
    others: int
    weights: int
    activations: int
    graphs: int

    def left_for_cache(self, utilization: float, ranks: int = 1) -> int:
        """What utilization of the card leaves; negative if the rest alone takes more.

        Args:
            ranks: how many share the card. Their weights are among the others', their activations and graphs are not.
        """
        left = int(self.total * utilization) - self.others - self.weights - ranks * (self.activations + self.graphs)
        return left // ranks

    def describe(self) -> str:
        others = {"CUDA and other processes": self.others}
        parts = {"weights": self.weights, "activations": self.activations, "graphs": self.graphs, **others}
        return ", ".join(f"{name} {value / 2**30:.2f} GiB" for name, value in parts.items())


def memory_of_others(device: torch.device) -> int:
    """Bytes of the GPU that are taken, but not by this process's allocator: other processes, and CUDA itself."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def check_free_memory(num_bytes: int, device: torch.device, what: str, advice: str) -> None:
    """Raise a ValueError if the device has less memory free than something would take."""
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
    config: ResolvedConfig, block_bytes: int, device: torch.device, ranks: int, measure: Callable[[], GpuMemory]
) -> int:
    """How many blocks a rank may have: an explicit count wins, then explicit bytes.

    Where nothing is said, a GPU gives what is left of it, and a CPU a quarter of the free memory, at most 4 GiB: a
    guest on the machine.

    Args:
        ranks: how many share the device.
        measure: where a GPU's memory goes.

    Raises:
        ValueError: not enough for one sequence of max_model_len, or more than the device has.
    """

    def check_fits(num_bytes: int, option: str) -> None:
        check_free_memory(ranks * num_bytes, device, "the KV cache", f"lower {option}")

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
        budget = min(free_memory() // 4, CPU_CACHE_LIMIT) // ranks
    return blocks_that_fit(budget, block_bytes, config.block_size, config.max_model_len)


def blocks_that_fit(num_bytes: int, block_bytes: int, block_size: int, max_model_len: int) -> int:
    """How many blocks the bytes hold.

    Raises:
        ValueError: they cannot hold one sequence of max_model_len; names the largest length that would fit.
    """
    num_blocks = max(num_bytes // block_bytes, 0)
    check_pool(num_blocks, block_size, max_model_len)
    return num_blocks


def check_pool(num_blocks: int, block_size: int, max_model_len: int) -> None:
    """Raise a ValueError unless the blocks hold one sequence of max_model_len."""
    needed = -(-max_model_len // block_size)
    if num_blocks < needed:
        advice = f"set max_model_len to at most {num_blocks * block_size}" if num_blocks else "nothing would fit"
        raise ValueError(
            f"the KV cache has {num_blocks} blocks of {block_size} tokens, and one sequence of "
            f"max_model_len={max_model_len} needs {needed}: {advice}, or give it more memory "
            "(kvcache_memory_bytes, num_kvcache_blocks, gpu_memory_utilization)"
        )
