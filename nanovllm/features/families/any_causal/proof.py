"""A proof at load: a short text through the engine's cache and attention, and through transformers' own attention.

Modules and weights are the same, so the numbers are the same up to rounding. If a scale, a cap, sinks, shared keys or
positions were lost on the way to the engine's attention, the numbers would differ by far more.
"""

from dataclasses import replace
from subprocess import SubprocessError
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.backends import CacheSize
from nanovllm.config import ResolvedConfig

if TYPE_CHECKING:
    from nanovllm.features.families.any_causal.decoder import AnyDecoder

CHUNKS = (9, 7, 1, 1, 118, 1, 162, 1)
"""The tokens that the steps compute, 300 in all: chunks of a prompt, and decodes. Some code does more for long ones."""

WORST_FLOAT32 = 0.005
"""The largest difference of a token's log-probability in float32. Small random models of 73 architectures differ by
1e-5 to 1e-4, and two with latent attention and huge logits by 3e-3. A scale that is wrong by a fifth makes 0.2 to 20.
"""

MIDDLE_16_BITS = 0.3
"""The median of the differences with 16 bits, where rounding alone may move a single token by more than 1: the median
of such models is 0.005 to 0.17, but for two with huge logits. So 16 bits show gross mistakes alone."""

_STEMS = """
Afmoe Apertus Arcee AriaText BioGpt BitNet Cohere2 Cohere Cwm DeepseekV2 DeepseekV3 Dots1 Ernie4_5
Ernie4_5_Moe Exaone4 ExaoneMoe FlexOlmo GPTBigCode GPTJ GPTNeoX Gemma2 Gemma3 Gemma3n Gemma4 Gemma Glm4
Glm4Moe Glm4MoeLite Glm GptOss Granite GraniteMoe GraniteMoeHybrid GraniteMoeShared GraniteSWA Helium
HunYuanDenseV1 HunYuanMoEV1 HyperCLOVAX Jais2 Laguna Llama Mellum MiMoV2Flash MiniCPM3 MiniMaxM2 Ministral3
Ministral Mistral Mixtral NanoChat Nemotron OPT Olmo2 Olmo3 Olmo Olmoe Persimmon Phi3 Phi Phimoe Qwen2
Qwen2Moe Qwen3 Qwen3Moe SeedOss SmolLM3 SolarOpen StableLm Starcoder2 VaultGemma Youtu
"""
TESTED = frozenset((*(f"{stem}ForCausalLM" for stem in _STEMS.split()), "GPT2LMHeadModel"))
"""The classes that tests/models/test_any_model.py compares with transformers. They need no proof at load."""


def prove(model: "AnyDecoder", config: ResolvedConfig) -> None:
    """Raise a ValueError if the engine's attention and transformers' own give different numbers, or if one fails."""
    name = type(model.hf).__name__
    generator = torch.Generator().manual_seed(0)
    num_tokens = min(sum(CHUNKS), config.max_model_len)
    ids = torch.randint(config.vocab_size, (num_tokens,), generator=generator, dtype=torch.int32)
    try:
        differences = (run_paged(model, config, ids) - run_whole(model, ids)).abs()
    except (OSError, MemoryError, SubprocessError, torch.OutOfMemoryError):  # this machine's fault, not the model's
        raise
    except Exception as error:  # whatever transformers' code raises for values that contradict each other
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"{name} is not run, because no text can be computed with it: {what}") from error
    is_wide = config.dtype == "float32"
    found = float(differences.max() if is_wide else differences.median())
    bound = WORST_FLOAT32 if is_wide else MIDDLE_16_BITS
    if not found <= bound:  # so NaN fails, too
        raise ValueError(
            f"{name} gives other numbers with this engine's attention than with transformers': log-probabilities "
            f"differ by {found:.3g}, and by rounding they may differ by {bound} in {config.dtype}; so it is not run"
        )


def run_whole(model: "AnyDecoder", ids: Tensor) -> Tensor:
    """Return the log-probabilities of a text's tokens after the first, by transformers' attention and its positions."""
    device = model.cos_sin.device
    model.choose_attention("eager")
    try:
        hidden = model.body(input_ids=ids[None].long().to(device), use_cache=False)[0][0]
    finally:
        model.choose_attention()
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
    for most in CHUNKS:
        tokens = ids[computed : computed + most].to(device)
        length = len(tokens)
        if not length:
            break
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
