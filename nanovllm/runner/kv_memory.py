"""Decides how many blocks the KV cache gets, and makes it."""

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from nanovllm.config import ResolvedConfig
from nanovllm.utils.integers import ceil_div
from nanovllm.utils.memory import check_free_memory

if TYPE_CHECKING:
    from nanovllm.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)


def make_cache(runner: "ModelRunner") -> int:
    """Make the KV cache, of as many blocks as every rank has room for, and what replays the steps that read it.

    All ranks call it, once. Returns the number of blocks.

    Raises:
        ValueError: the cache cannot hold one sequence of the max_model_len that the user gave.
    """
    config = runner.config
    with runner.backend.on_device():
        runner.backend.compile_kernels(runner)
        num_blocks = runner.parallel.minimum(count_blocks(runner))
        num_gib = num_blocks * runner.count_block_bytes() / 2**30
        num_tokens = num_blocks * config.block_size
        room = f"{num_tokens} tokens, {num_tokens / config.max_model_len:.1f} sequences of {config.max_model_len}"
        logger.info("KV cache %.2f GiB: %d blocks of %d tokens, %s", num_gib, num_blocks, config.block_size, room)
        runner.fill_cache(num_blocks)
    return num_blocks


def count_blocks(runner: "ModelRunner") -> int:
    """Return how many blocks a rank's cache gets: num_kvcache_blocks, else as many as kvcache_memory_bytes hold.

    If the user gives neither, the backend says how much room there is.

    Raises:
        ValueError: the cache could not hold one sequence of the max_model_len that the user gave, or takes more than
            the device has.
    """
    config = runner.config
    least_tokens = config.max_model_len if config.has_given_length else 1  # a length of ours: `fit_length` reduces it
    backend = runner.backend
    block_bytes = runner.count_block_bytes()
    num_sharers = runner.parallel.ranks_per_device  # each of them needs as much

    def check_fits(num_bytes: int, option: str) -> None:
        check_free_memory(num_sharers * num_bytes, backend.free_memory(), "the KV cache", f"lower {option}")

    states = f"the states of {config.max_num_seqs} rows"
    check_free_memory(num_sharers * runner.count_state_bytes(), backend.free_memory(), states, "lower max_num_seqs")
    if config.num_kvcache_blocks is not None:
        check_pool(config.num_kvcache_blocks, config.block_size, least_tokens)
        check_fits(config.num_kvcache_blocks * block_bytes, "num_kvcache_blocks")
        return config.num_kvcache_blocks
    most_blocks = max(config.max_num_seqs * ceil_div(config.usual_length, config.block_size), config.max_blocks_per_seq)
    if (budget := config.kvcache_memory_bytes) is not None:
        check_fits(budget, "kvcache_memory_bytes")
    else:
        budget = backend.room_for_cache(runner, most_blocks * block_bytes)
    if not block_bytes:  # no layer of this rank has keys and values: the other ranks decide
        return most_blocks
    return blocks_that_fit(budget, block_bytes, config.block_size, least_tokens)


def bound_length(runner: "ModelRunner") -> ResolvedConfig:
    """Return a runner's configuration with a max_model_len that its KV cache can have room for, at best.

    A model may say that it is made for any number of positions. Tables are made before the cache is, so long that no
    cache needs longer ones. When the cache is there, `fit_length` lowers the length further.

    Raises:
        ValueError: the user gave a longer one.
    """
    config = runner.config
    num_blocks = config.num_kvcache_blocks
    if num_blocks is None:
        budget = config.kvcache_memory_bytes
        if budget is None:
            budget = runner.backend.room_beside(0, config.gpu_memory_utilization)
        block_bytes = runner.count_block_bytes()
        num_blocks = budget // block_bytes if block_bytes else config.max_blocks_per_seq
    if config.has_given_length:
        check_pool(num_blocks, config.block_size, config.max_model_len)
        return config
    return replace(config, max_model_len=min(config.max_model_len, max(num_blocks, 1) * config.block_size))


def fit_length(config: ResolvedConfig, num_blocks: int) -> ResolvedConfig:
    """Return the configuration of an engine whose KV cache has so many blocks.

    If the user gave no max_model_len, it becomes as long as the cache can hold. Tables stay as they are made.
    """
    most = num_blocks * config.block_size
    if config.has_given_length or most >= config.max_model_len:
        return config
    logger.warning(
        "max_model_len is %d, not the model's %d: the KV cache holds no longer sequence. Give it more memory "
        "(kvcache_memory_bytes, num_kvcache_blocks, gpu_memory_utilization), or set max_model_len",
        *(most, config.max_model_len),
    )
    return replace(config, max_model_len=most)


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
