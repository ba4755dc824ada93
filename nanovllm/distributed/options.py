"""Resolves the options of an engine with several ranks: how they talk, and how a pipeline is kept busy."""

from dataclasses import replace

import torch

from nanovllm.config import EngineConfig, ResolvedConfig

SMALLEST_BUDGET = 128
"""With fewer tokens a step would multiply more slowly."""


def resolve_ranks(asked: EngineConfig, config: ResolvedConfig) -> ResolvedConfig:
    """Return the configuration of several ranks.

    Args:
        asked: the user's options.
        config: the same, resolved for one device.

    Raises:
        ValueError: the ranks cannot talk as `distributed_backend` asks.
    """
    stages = config.pipeline_parallel_size
    device = torch.device(config.device)
    backend = resolve_distributed_backend(config.distributed_backend, device, config.num_ranks, stages > 1)
    # A CUDA graph cannot capture work of the host, through which gloo sends.
    config = replace(config, distributed_backend=backend, use_graphs=config.use_graphs and backend != "gloo")
    if stages == 1:
        return config
    budget = asked.max_num_batched_tokens or shrink_budget(config.max_num_batched_tokens, stages)
    return replace(config, depth=stages, max_num_batched_tokens=budget)


def shrink_budget(budget: int, stages: int) -> int:
    """Return the default max_num_batched_tokens of a pipeline, given that of one device.

    While one stage computes a chunk, the others need chunks of their own. And they have nothing to do while the first
    chunks come and the last ones go.
    """
    return max(budget // (8 * stages), SMALLEST_BUDGET)


def resolve_distributed_backend(name: str, device: torch.device, size: int, is_pipeline: bool) -> str:
    """Return the library through which the ranks talk: for "auto" NCCL on CUDA and gloo on a CPU, or in a pipeline.

    Raises:
        ValueError: NCCL cannot run here; the message names an alternative.
    """
    if name == "auto":
        name = "nccl" if device.type == "cuda" and not is_pipeline else "gloo"
    if name == "nccl":
        if is_pipeline:
            raise ValueError('distributed_backend="nccl" has no links for pipeline_parallel_size; use "gloo" or "auto"')
        if device.type != "cuda":
            raise ValueError('distributed_backend="nccl" needs CUDA devices; on a CPU use "gloo" or "auto"')
        if (count := torch.cuda.device_count()) < size:
            raise ValueError(
                f"tensor_parallel_size is {size}, and NCCL wants a GPU for each rank: there are {count}; change it, "
                'or let ranks share a GPU with distributed_backend="gloo"'
            )
    return name
