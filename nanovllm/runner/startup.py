"""Prepares a runner whose model is loaded: compiles kernels, measures memory, makes the KV cache and CUDA graphs.

On a CPU it makes recorded steps in place of the graphs.
"""

import gc
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

import numpy as np
import torch
from torch import nn

from nanovllm.backends import CacheSize, LayerCache
from nanovllm.backends.cpu.recorded_steps import RecordedSteps
from nanovllm.backends.gpu.cuda_graphs import CudaGraphs, Decode, Sample
from nanovllm.backends.gpu.grouped_linear import TILES
from nanovllm.backends.gpu.launch import compile_launches
from nanovllm.edits.edit_logits import MaskAndPenalties
from nanovllm.engine.plan import SAMPLING_COLUMNS, StepPlan
from nanovllm.layers.linear import MatrixModule
from nanovllm.models.decoder import Decoder
from nanovllm.runner.kv_memory import GpuMemory, count_blocks
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.utils.integers import ceil_div

logger = logging.getLogger(__name__)

EDIT_BYTES = 5
"""For each logit that is edited: itself in float32, and its place in a mask."""
COUNT_BYTES = 4
"""For each token of the vocabulary and each sequence: how often the sequence has it, for penalties."""
GRAPH_NODES_BYTES = 4 << 20
"""Allowance for one captured graph's own nodes: a few hundred kernels' parameters."""


def make_cache(runner: ModelRunner) -> int:
    """Make the KV cache, of as many blocks as every rank has room for, and capture the graphs that read it.

    All ranks call it, once. Returns the number of blocks.

    Raises:
        ValueError: the cache cannot hold one sequence of max_model_len.
    """
    config = runner.config
    with runner.on_device():
        copy_context().run(compile_kernels, runner)  # Triton 3.6 leaves a mark in its context where a compile fails
        block_bytes = count_block_bytes(runner)
        ranks = runner.parallel.ranks_per_device
        states = count_state_bytes(runner)
        num_blocks = count_blocks(config, block_bytes, states, runner.device, ranks, lambda: measure_memory(runner))
        num_blocks = runner.parallel.minimum(num_blocks)
        num_gib = num_blocks * block_bytes / 2**30
        num_tokens = num_blocks * config.block_size
        room = f"{num_tokens} tokens, {num_tokens / config.max_model_len:.1f} sequences of {config.max_model_len}"
        logger.info("KV cache %.2f GiB: %d blocks of %d tokens, %s", num_gib, num_blocks, config.block_size, room)
        fill_cache(runner, num_blocks)
    return num_blocks


def fill_cache(runner: ModelRunner, num_blocks: int) -> None:
    """Allocate the KV cache of a runner and of its draft model, and make what repeats steps: graphs, or recordings."""
    config = runner.config
    is_recorded = runner.backend.name == "cpu" and config.num_ranks == 1 and not config.enforce_eager
    for each in (runner, runner.draft):
        if each is not None:
            each.caches = make_caches(each, num_blocks)
            each.graphs = RecordedSteps(each.staging.buffer, config.max_num_seqs) if is_recorded else None
    if config.use_graphs:
        capture_graphs(runner)
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)  # the first step may come from another thread's stream


def capture_graphs(runner: ModelRunner) -> None:
    """Capture the graphs of all batch sizes. They read the weights and the cache where these lie now."""
    graphs = make_graphs(runner)
    runner.graphs = graphs
    with runner.on_device(), torch.inference_mode():
        graphs.capture(*bind_halves(runner), show_progress=runner.parallel.number == 0)


def count_block_bytes(runner: ModelRunner) -> int:
    """Return the bytes of one block on this rank: keys and values of all layers, and those of the draft model."""
    own = runner.shape.kv_bytes(runner.dtype.itemsize) * runner.config.block_size
    return own + (count_block_bytes(runner.draft) if runner.draft is not None else 0)


def count_state_bytes(runner: ModelRunner) -> int:
    """Return the bytes of the states of all rows on this rank, that of padding included; 0 for most models."""
    return runner.shape.row_bytes(runner.dtype.itemsize) * (runner.config.max_num_seqs + 1)


def make_caches(runner: ModelRunner, num_blocks: int) -> list[LayerCache]:
    """Return the cache of each layer: blocks for keys and values, or a state for each row."""
    size = CacheSize(num_blocks, runner.config.block_size, runner.config.max_num_seqs + 1)
    layers: Iterable[Any] = runner.model.layers
    return [layer.self_attn.make_cache(size, runner.dtype, runner.device) for layer in layers]


def make_graphs(runner: ModelRunner) -> CudaGraphs:
    """Return the graphs of a runner, none of them captured."""
    return CudaGraphs(runner.staging.buffer, runner.config.max_num_seqs, runner.device_rows.padding_row)


def bind_halves(runner: ModelRunner) -> tuple[Decode, Sample | None]:
    """Return the two halves of a decode step as the graphs of a runner record them."""
    return runner.parallel.bind_halves(runner.decode, runner.sample_decoded)


@torch.inference_mode()
def compile_kernels(runner: ModelRunner) -> None:
    """Compile the Triton kernels that steps will launch, several at a time.

    Runs steps on fake tensors, which have shapes but no values, to learn which kernels are needed. flash-attn cannot
    work on fake tensors, so with it only the kernels that read logits are compiled here, and the others in the first
    steps. Each rank compiles for its own share of the model. Only rank 0 has logits.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    has_kernels = runner.backend.name in ("triton", "flash_attn")
    if runner.device.type != "cuda" or not has_kernels:
        return
    is_rank_0 = runner.parallel.number == 0
    runner.parallel.sends_nothing = True
    try:
        with compile_launches(show_progress=is_rank_0), FakeTensorMode(allow_non_fake_inputs=True):
            if runner.backend.name == "triton":
                # Steps come first because they have the kernels that take longest to compile.
                launch_steps(runner)
                if runner.draft is not None:
                    launch_steps(runner.draft)
            if is_rank_0:
                with torch.device(runner.device):
                    launch_logits_kernels(runner)
    finally:
        runner.parallel.sends_nothing = False


def launch_steps(runner: ModelRunner) -> None:
    """Run steps of every kind that has kernels of its own."""
    config = runner.config
    graphs = make_graphs(runner)
    mixed = StepPlan.largest(2, 3, config.max_model_len)  # a decode and a prompt of two tokens
    plans = [mixed]
    # Products with experts and with quantised matrices have a kernel for each range of the number of tokens.
    limits = {most for most, _, _ in TILES} if runner.shape.experts else set()
    matrices = [module for module in runner.model.modules() if isinstance(module, MatrixModule)]
    limits.update(*(getattr(matrix.packed, "row_limits", ()) for matrix in matrices))
    for most in sorted(limits):
        num_tokens = min(most + 1, config.max_num_batched_tokens)
        plans.append(StepPlan.largest(config.max_num_seqs, num_tokens, config.max_model_len))
    # A few kernels know the next power of two of the batch size, 256 or more.
    sizes = {1, config.max_num_seqs, *(2**i for i in range(9, config.max_num_seqs.bit_length()))}
    with keep_one_layer_of_each_kind(runner.model):
        runner.caches = make_caches(runner, 1)
        for plan in plans:
            unscored = plan._replace(num_scored=np.zeros_like(plan.num_scored), targets=plan.targets[:0])
            runner.compute(unscored, runner.staging.buffer[: unscored.head_size])
        decode, sample = bind_halves(runner)
        for size in sizes:
            decoded = decode(graphs.inputs(size))
            if sample is not None:
                sample(*decoded)
    runner.caches = []


def launch_logits_kernels(runner: ModelRunner) -> None:
    """Launch the kernels that read logits: in the model's dtype, and in float32 for edits and log-probabilities."""
    backend = runner.backend
    vocab = runner.hf_config.vocab_size  # of all ranks: rank 0 gathers their logits
    ids = torch.empty(2, dtype=torch.int32)
    sampling = torch.empty(2, len(SAMPLING_COLUMNS), dtype=torch.int32)
    for dtype in (runner.dtype, torch.float32):
        logits = torch.empty(2, vocab, dtype=dtype)
        backend.sample(logits, sampling, ids, ids)
        backend.token_logprobs(logits, ids)
    masks = torch.empty(2, ceil_div(vocab, 32), dtype=torch.int32)
    counts = torch.empty(2, vocab, dtype=torch.int32)
    penalties = torch.empty(2, 3, dtype=torch.float32)
    logits = torch.empty(2, vocab, dtype=torch.float32)
    backend.edit_logits(logits, MaskAndPenalties(ids, masks, ids, None, None))
    backend.edit_logits(logits, MaskAndPenalties(ids, None, ids, counts, penalties))
    backend.edit_logits(logits, MaskAndPenalties(ids, masks, ids, counts, penalties))


@contextmanager
def keep_one_layer_of_each_kind(model: Decoder) -> Iterator[None]:
    """Within, the model has one layer of each kind, such as a dense one and one with experts: they launch every
    kernel."""
    layers = model.layers
    model.layers = nn.ModuleList({(type(layer.self_attn), type(layer.mlp)): layer for layer in layers}.values())
    try:
        yield
    finally:
        model.layers = layers


def measure_memory(runner: ModelRunner) -> GpuMemory:
    """Measure how much of the GPU the largest step and the graphs take, with a cache of a single block."""
    gc.collect()  # an engine that was dropped without close() may still hold its cache
    torch.cuda.empty_cache()
    weights = torch.cuda.memory_allocated(runner.device)
    runner.caches = make_caches(runner, 1)
    states = count_state_bytes(runner)
    activations = _measure_largest_step(runner) - weights - states
    graphs = _measure_graphs(runner) if runner.config.use_graphs else 0
    runner.caches = []
    torch.cuda.empty_cache()
    runner.parallel.minimum(0)  # waits until ranks on the same GPU have given back their activations, too
    free, total = torch.cuda.mem_get_info(runner.device)
    others = total - free - torch.cuda.memory_reserved(runner.device)
    return GpuMemory(total, others, weights, activations, graphs, states)


def _measure_largest_step(runner: ModelRunner) -> int:
    """Return the most bytes that are allocated at any time of the largest step, weights included."""
    config = runner.config
    torch.cuda.reset_peak_memory_stats(runner.device)
    plan = StepPlan.largest(
        config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len, config.num_speculative_tokens
    )
    # Padding rows store nothing and read block 0: the shapes are real, the values are not.
    plan.rows[:] = runner.device_rows.padding_row
    runner.launch(plan).result()
    num_bytes = torch.cuda.max_memory_allocated(runner.device)
    num_bytes += runner.parallel.num_transfers * plan.num_tokens * runner.shape.hidden * runner.dtype.itemsize
    if runner.parallel.number == 0:
        num_edited = min(config.max_num_seqs * (1 + config.num_speculative_tokens), config.max_num_batched_tokens)
        edits = EDIT_BYTES * num_edited + COUNT_BYTES * config.max_num_seqs
        num_bytes += edits * runner.shape.vocab * runner.parallel.size
    return num_bytes


def _measure_graphs(runner: ModelRunner) -> int:
    """Return about how many bytes the captured graphs will keep: captures the two largest, and lets go of them."""
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info(runner.device)[0]
    trial = make_graphs(runner)
    trial.capture(*bind_halves(runner), trial.sizes[-2:])
    taken = before - torch.cuda.mem_get_info(runner.device)[0]  # below 0 if another rank has freed more meanwhile
    per_graph = max(taken, 0) // len(trial.sizes[-2:])
    trial.release()
    # The largest pays for the pool that all share; each of the others adds its own nodes.
    return 2 * per_graph + len(trial.sizes) * GRAPH_NODES_BYTES
