"""Resolves the options of a model that keeps a state for each row: what it cannot do, and how many rows fit."""

import logging
from dataclasses import replace

import torch

from nanovllm.backends import make_backend
from nanovllm.config import DEFAULT_NUM_SEQS, EngineConfig, ResolvedConfig
from nanovllm.models.layers.weights import Quantizer
from nanovllm.models.sizes import Sizes

logger = logging.getLogger(__name__)


def resolve_states(
    asked: EngineConfig,
    config: ResolvedConfig,
    sizes: Sizes,
    quantizer: Quantizer | None,
    gpu_memory: int | None = None,
) -> ResolvedConfig:
    """Return the configuration of a model with a state per row: see `Family.resolve`."""
    if asked.enable_prefix_caching:
        raise ValueError(
            "enable_prefix_caching is True, and this model keeps a state for each sequence, which has no blocks that "
            "another sequence could take over: set it to False, or leave it out"
        )
    if asked.speculative_config is not None:
        raise ValueError(
            "speculative_config asks for drafts, and this model keeps a state for each sequence, which cannot take "
            "back the tokens of a wrong draft: leave it out"
        )
    logger.info("prefix caching is off: the model keeps a state for each sequence")
    dtype = getattr(torch, config.dtype)
    weights = sizes.weight_bytes(dtype, quantizer) // config.num_devices
    row_bytes = sizes.row_bytes(dtype)
    num_seqs = asked.max_num_seqs or count_rows_that_fit(config, weights, row_bytes, gpu_memory)
    return replace(config, enable_prefix_caching=False, max_num_seqs=num_seqs)


def count_rows_that_fit(config: ResolvedConfig, weights: int, row_bytes: int, gpu_memory: int | None = None) -> int:
    """Return the max_num_seqs of a model with a state per row, by the memory that is free before it is loaded.

    Args:
        weights: the bytes of the weights on one device.
        row_bytes: the bytes of a row's state, on all devices together.
        gpu_memory: the bytes of a GPU that need not be here; None: the device that `config` names.
    """
    if gpu_memory is not None:
        room = int(gpu_memory * config.gpu_memory_utilization) - weights
    else:
        backend = make_backend(config.attention_backend, config.device)
        room = backend.room_beside(weights, config.gpu_memory_utilization)
    return fit_rows(room, row_bytes // config.num_devices)  # ranks on a CPU share its memory


def fit_rows(room: int, row_bytes: int) -> int:
    """Return the max_num_seqs for states of row_bytes each: DEFAULT_NUM_SEQS, or as many as half of the room holds.

    The other half is for keys and values. One row more is there for padding.
    """
    num_seqs = min(DEFAULT_NUM_SEQS, max(room // 2 // row_bytes - 1, 1))
    total = (num_seqs + 1) * row_bytes
    logger.info(
        "max_num_seqs is %d: the state of a sequence takes %.1f MiB, and all of them %.2f GiB of memory",
        *(num_seqs, row_bytes / 2**20, total / 2**30),
    )
    return num_seqs
