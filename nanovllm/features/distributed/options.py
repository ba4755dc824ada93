"""Resolves the options of an engine with several ranks: how they talk, and how a pipeline is kept busy."""

import logging
from dataclasses import replace

from torch.distributed import get_default_backend_for_device

from nanovllm.config import EngineConfig, ResolvedConfig

logger = logging.getLogger(__name__)

SMALLEST_BUDGET = 128
"""With fewer tokens a step would multiply more slowly."""


def resolve_ranks(asked: EngineConfig, config: ResolvedConfig, is_described: bool = False) -> ResolvedConfig:
    """Return the configuration of several ranks.

    Args:
        asked: the user's options.
        config: the same, resolved for one device.
        is_described: the devices need not be here, so they are not asked how they can talk.

    Raises:
        ValueError: the ranks cannot talk as `distributed_backend` asks.
    """
    stages = config.pipeline_parallel_size
    if not is_described:
        config = replace(config, distributed_backend=resolve_distributed_backend(config))
    if stages == 1:
        # A CUDA graph cannot capture work of the host, through which gloo sends. Stages send between their graphs.
        return replace(config, use_graphs=config.use_graphs and config.distributed_backend != "gloo")
    # While one stage computes a chunk, the others need chunks of their own. And they have nothing to do while the first
    # chunks come and the last ones go.
    budget = asked.max_num_batched_tokens or max(config.max_num_batched_tokens // (8 * stages), SMALLEST_BUDGET)
    depth = stages + (config.distributed_backend == "nccl") * (config.depth - 1)  # for gloo's receives the host waits
    return replace(config, depth=depth, max_num_batched_tokens=budget)


def resolve_distributed_backend(config: ResolvedConfig) -> str:
    """Return the library through which the ranks talk: for "auto" NCCL on CUDA and gloo on a CPU.

    The stages of a pipeline may share a GPU: then "auto" is gloo, too.

    Raises:
        ValueError: NCCL cannot run here; the message names an alternative.
    """
    name = config.distributed_backend
    fastest = get_default_backend_for_device(config.device)
    size = config.num_ranks
    num_devices = config.num_devices
    is_pipeline = config.pipeline_parallel_size > 1
    if name == "auto":
        name = fastest
        if name == "nccl" and is_pipeline and num_devices < size:
            logger.info("%d stages share %d GPUs: their hidden states go through the host, by gloo", size, num_devices)
            name = "gloo"
    if name == "nccl":
        if name != fastest:
            raise ValueError('distributed_backend="nccl" needs CUDA devices; on a CPU use "gloo" or "auto"')
        if num_devices < size:
            option = "pipeline_parallel_size" if is_pipeline else "tensor_parallel_size"
            raise ValueError(
                f"{option} is {size}, and NCCL wants a GPU for each rank: there are {num_devices}; change it, "
                'or let ranks share a GPU with distributed_backend="gloo"'
            )
    return name
