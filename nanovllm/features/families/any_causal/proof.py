"""A proof at load: a short text through the engine's cache and attention, and through transformers' own attention.

Modules and weights are the same, so the numbers are the same up to rounding. If a scale, a cap, sinks, shared keys or
positions were lost on the way to the engine's attention, the numbers would differ by far more.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.backends import CacheSize
from nanovllm.config import ResolvedConfig

if TYPE_CHECKING:
    from nanovllm.features.families.any_causal.decoder import AnyDecoder

NUM_TOKENS = 20
CHUNKS = (9, 7, 1, 1, 1, 1)
"""The tokens that the steps compute: chunks of a prompt, and decodes."""

BOUNDS = {"float32": 0.001, "bfloat16": 0.5, "float16": 0.1}
"""The largest difference of a token's log-probability, by the number format."""

TESTED: frozenset[str] = frozenset()
"""The classes that tests/models/test_any_model.py compares with transformers. They need no proof at load."""


def prove(model: "AnyDecoder", config: ResolvedConfig) -> None:
    """Raise a ValueError if the engine's attention gives other numbers than transformers' own attention."""
    name = type(model.hf).__name__
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (NUM_TOKENS,), generator=generator, dtype=torch.int32)
    difference = float((run_paged(model, config, ids) - run_whole(model, ids)).abs().max())
    bound = BOUNDS[config.dtype]
    if not difference <= bound:  # so NaN fails, too
        raise ValueError(
            f"{name} gives other numbers with this engine's attention than with transformers': a log-probability "
            f"differs by {difference:.3g}, and by rounding it may differ by {bound} in {config.dtype}; so it is not run"
        )


def run_whole(model: "AnyDecoder", ids: Tensor) -> Tensor:
    """Return the log-probabilities of a text's tokens after the first, by transformers' attention."""
    device = model.cos_sin.device
    positions = torch.arange(len(ids), device=device)[None]
    model.choose_attention("eager")
    try:
        hidden = model.body(input_ids=ids[None].long().to(device), position_ids=positions, use_cache=False)[0][0]
    finally:
        model.choose_own_attention()
    return score(model, hidden, ids)


def run_paged(model: "AnyDecoder", config: ResolvedConfig, ids: Tensor) -> Tensor:
    """Return the same by the engine's attention: in chunks, then token by token, over pages of a cache."""
    device = model.cos_sin.device
    backend = model.backend
    num_blocks = -(-len(ids) // config.block_size) + 1
    size = CacheSize(num_blocks, config.block_size, 1, getattr(torch, config.dtype))
    layers: list[Any] = [layer.self_attn for layer in model.layers]
    caches: list[Any] = [layer.make_cache(size, size.kv_dtype, device) for layer in layers]

    def send(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    tables = torch.stack((send(*range(1, num_blocks), 0), send(*[0] * num_blocks)))
    computed = 0
    parts: list[Tensor] = []
    for length in CHUNKS:
        tokens = ids[computed : computed + length].to(device)
        row = (send(0), send(computed), send(length), tokens)
        inputs = backend.step_inputs(*row, tables, send(0, 0), config.block_size)
        computed += length
        inputs = replace(
            inputs,
            num_decodes=int(length == 1),
            query_lens_cpu=np.array([length], np.int32),
            seq_lens_cpu=np.array([computed], np.int32),
        )
        inputs = backend.prepare_attention(inputs, caches[0], layers[0].num_heads)
        parts.append(model(inputs, caches).clone())
    return score(model, torch.cat(parts), ids)


def score(model: "AnyDecoder", hidden: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probability of each token of a text after the first, on the CPU."""
    logits = model.compute_logits(hidden[:-1])
    assert logits is not None
    return logits.float().log_softmax(-1).gather(1, ids[1:, None].long().to(logits.device)).cpu()
