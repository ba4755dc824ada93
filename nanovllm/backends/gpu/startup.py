"""Compiles the Triton kernels that steps will launch, before the first step."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from nanovllm.backends.gpu.cuda_graphs import CudaGraphs
from nanovllm.backends.gpu.launch import compile_launches
from nanovllm.backends.gpu.online_softmax import read_variant
from nanovllm.backends.steps import EAGER
from nanovllm.engine.plan import SAMPLING_COLUMNS, StepPlan
from nanovllm.models.decoder import Decoder
from nanovllm.utils.integers import ceil_div

if TYPE_CHECKING:
    from nanovllm.runner.model_runner import ModelRunner


@torch.inference_mode()
def compile_kernels(runner: "ModelRunner", runs_on_fake_tensors: bool) -> None:
    """Compile the Triton kernels that steps will launch, several at a time.

    Runs steps on fake tensors, which have shapes but no values, to learn which kernels are needed. flash-attn cannot
    work on fake tensors, so with it only the kernels that read logits are compiled here, and the others in the first
    steps. Each rank compiles for its own share of the model. Only rank 0 has logits.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    is_rank_0 = runner.parallel.rank == 0
    runner.parallel.sends_nothing = True
    try:
        with compile_launches(show_progress=is_rank_0), FakeTensorMode(allow_non_fake_inputs=True):
            if runs_on_fake_tensors:
                # Steps come first because they have the kernels that take longest to compile.
                launch_steps(runner)
                if runner.draft is not None:
                    launch_steps(runner.draft)
            if is_rank_0:
                with torch.device(runner.device):
                    launch_logits_kernels(runner)
    finally:
        runner.parallel.sends_nothing = False


def launch_steps(runner: "ModelRunner") -> None:
    """Run steps of every kind that has kernels of its own."""
    config = runner.config
    graphs = CudaGraphs(runner)
    mixed = StepPlan.largest(2, 3, config.max_model_len)  # a decode and a prompt of two tokens
    plans = [mixed]
    # Products with experts, with quantised matrices and of few rows have kernels for ranges of the number of tokens.
    modules = list(runner.model.modules())
    kernels = [getattr(module, name, None) for module in modules for name in ("operators", "multiply")]
    kernels += [matrix for module in modules for matrix in list_packed(module)]
    limits: set[int] = set().union(*(getattr(kernel, "row_limits", ()) for kernel in kernels))
    for most in sorted(limits):
        num_tokens = min(most + 1, config.max_num_batched_tokens)
        plans.append(StepPlan.largest(config.max_num_seqs, num_tokens, config.max_model_len))
    # A few kernels know the next power of two of the batch size, 256 or more.
    sizes = {1, config.max_num_seqs, *(2**i for i in range(9, config.max_num_seqs.bit_length()))}
    with keep_one_layer_of_each_kind(runner.model):
        runner.caches = runner.make_caches(1)
        for plan in plans:
            unscored = plan._replace(num_scored=np.zeros_like(plan.num_scored), targets=plan.targets[:0])
            runner.run_head(runner.run_layers(unscored, EAGER))
        for size in sizes:
            graphs.run_once(size)
    runner.caches = []


def launch_logits_kernels(runner: "ModelRunner") -> None:
    """Launch the kernels that read logits: in the model's dtype, and in float32 for edits and log-probabilities."""
    from nanovllm.features.edits.edit_logits import EditOperators, MaskAndPenalties

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
    edit_logits = backend.find_operators(EditOperators, "edit_logits").edit_logits
    edit_logits(logits, MaskAndPenalties(ids, masks, ids, None, None))
    edit_logits(logits, MaskAndPenalties(ids, None, ids, counts, penalties))
    edit_logits(logits, MaskAndPenalties(ids, masks, ids, counts, penalties))


def list_packed(module: nn.Module) -> list[Any]:
    """Return the packed matrices of a module, also those that lie side by side."""
    forms: Iterable[Any] = getattr(module, "list_packed", tuple)()
    return [matrix for form in forms for matrix in getattr(form, "parts", (form,))]


def find_kind(layer: nn.Module) -> tuple[object, ...]:
    """Return what decides which kernels a layer launches. A layer without attention has no variant of it, and the last
    one may end in another way. Matrices may be quantised differently in each layer."""
    constants, sinks = read_variant(getattr(layer.self_attn, "variant", None))
    is_last = getattr(layer, "is_last", False)
    forms = tuple(getattr(matrix, "form", None) for module in layer.modules() for matrix in list_packed(module))
    return type(layer), type(layer.self_attn), type(layer.mlp), *constants.values(), sinks is None, is_last, forms


@contextmanager
def keep_one_layer_of_each_kind(model: Decoder) -> Iterator[None]:
    """Within, the model has one layer of each kind, such as a dense one and one with experts: they launch every
    kernel. A layer with another window is of another kind, too.

    A decoder around transformers' modules keeps all layers, because transformers' code runs through them.
    """
    layers = model.layers
    if not isinstance(layers, nn.ModuleList):
        yield
        return
    last = {find_kind(layer): layer for layer in layers}
    model.layers = nn.ModuleList(layer for layer in layers if last[find_kind(layer)] is layer)  # in their order
    try:
        yield
    finally:
        model.layers = layers
