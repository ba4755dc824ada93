"""Tells which tensors of a checkpoint change nothing, though the model has no place for them.

Older libraries saved what is computed from config.json, and tools of quantisation save what this engine does not use.
Each kind is known by its name, and each tensor is checked: a value that says something else is not passed over.
"""

import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanovllm.models.model_config import find_rotary_dim
from nanovllm.models.model_folder import ModelFolder
from nanovllm.models.weight_names import name_some

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ROWS = 8
"""The rows of cached cosines and sines that are compared. Later ones multiply the rounding of the frequencies."""


def check_leftovers(
    places: Mapping[str, Path],
    names: Mapping[str, str],
    targets: Collection[str],
    config: "PretrainedConfig",
    folder: ModelFolder,
) -> None:
    """Raise a ValueError unless each tensor that the model has no place for is known to change nothing.

    Args:
        places: {name of such a tensor: its file}.
        names: {name: canonical name}.
        targets: the canonical names of the tensors that the model reads.
    """
    doubts: dict[str, str] = {}
    for path in sorted(set(places.values())):
        with folder.open_tensors(path) as file:
            for name in (name for name, place in places.items() if place == path):
                doubt = find_doubt(names[name], file.get_slice(name), targets, config)
                if doubt is not None:
                    doubts[names[name]] = doubt
    if doubts:
        reasons = "; ".join(sorted(set(filter(None, doubts.values()))))
        raise ValueError(
            f"{folder} has {len(doubts)} tensors that the model does not: {name_some(doubts)}"
            + (f" ({reasons})" if reasons else "")
        )


def find_doubt(name: str, source: Any, targets: Collection[str], config: "PretrainedConfig") -> str | None:
    """Return None if a tensor changes nothing, or why that is not certain; "" if its name is not known.

    Args:
        name: its canonical name.
        source: a slice object of safetensors.
        targets: the canonical names of the tensors that the model reads.
        config: the model's configuration.
    """
    if 0 in source.get_shape():
        return None  # Transformer Engine leaves such "_extra_state"
    owner, _, kind = name.rpartition(".")
    has_owner = any(f"{owner}.{suffix}" in targets for suffix in ("weight", "qweight", "weight_packed"))
    if kind == "bias" and has_owner:
        return None if not source[...].any() else "biases that are not zero, which config.json does not ask for"
    for pattern, check, doubt in KINDS:
        if re.search(pattern, name):
            return None if check(source[...].float(), config) else doubt
    return ""


def list_rotations(config: "PretrainedConfig") -> list[tuple[Tensor, float]]:
    """Return the frequencies of the rotation, each with the factor of its cosines: without scaling, and with it."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = config.rope_parameters
    dim = find_rotary_dim(config)
    found = [(rope["rope_theta"] ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim), 1.0)]
    if rope["rope_type"] != "default":
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
        found.append((frequencies.float(), factor))
    return found


def are_frequencies(values: Tensor, config: "PretrainedConfig") -> bool:
    """Return whether the values are the frequencies of config.json, up to the rounding of 16 bits."""
    expected = [frequencies for frequencies, _ in list_rotations(config)]
    return any(values.shape == own.shape and torch.allclose(values, own, rtol=0.01, atol=1e-7) for own in expected)


def are_cached(function: Callable[[Tensor], Tensor], values: Tensor, config: "PretrainedConfig") -> bool:
    """Return whether the values [..., positions, dim] are cached cosines, or sines, of the rotation.

    Args:
        function: torch.cos or torch.sin.
    """
    if values.dim() < 2:
        return False
    rows = values.flatten(0, -2)[:ROWS]
    positions = torch.arange(len(rows), dtype=torch.float32)
    for frequencies, factor in list_rotations(config):
        own = function(torch.outer(positions, frequencies)) * factor
        for expected in (own, torch.cat((own, own), dim=1)):
            if rows.shape == expected.shape and torch.allclose(rows, expected, rtol=0, atol=0.02):
                return True
    return False


def are_scales(values: Tensor, _: "PretrainedConfig") -> bool:
    return bool(((values > 0) & values.isfinite()).all())


def are_finite(values: Tensor, _: "PretrainedConfig") -> bool:
    return bool(values.isfinite().all())


def is_causal_mask(values: Tensor, _: "PretrainedConfig") -> bool:
    """Return whether the values [..., n, n] hide exactly the tokens that come after each token."""
    is_square = values.dim() > 1 and values.shape[-1] == values.shape[-2]
    return is_square and bool((values.bool() == torch.ones_like(values, dtype=torch.bool).tril()).all())


def is_masking_value(values: Tensor, _: "PretrainedConfig") -> bool:
    """Return whether the value is the one number that such a mask puts in the place of a score."""
    return values.numel() == 1 and bool(values <= -1e4)


ROTATION = r"\.(rotary_emb|rotary|rope)\."
ATTENTION = r"\.(self_attn|attention|attn)\."
OF_CACHE = ATTENTION + r"(attn\.)?((qkv|[qkv])_proj\.)?"
"""Of a KV cache in FP8: this engine finds scales of its own, for each token (see the option kv_cache_dtype)."""

KINDS: tuple[tuple[str, Callable[[Tensor, "PretrainedConfig"], bool], str], ...] = (
    (ROTATION + "inv_freq$", are_frequencies, "inv_freq is not what config.json's rope_theta gives"),
    (
        ROTATION + "(cos|cos_cached)$",
        partial(are_cached, torch.cos),
        "the cached cosines are not what config.json's rope_theta gives",
    ),
    (
        ROTATION + "(sin|sin_cached)$",
        partial(are_cached, torch.sin),
        "the cached sines are not what config.json's rope_theta gives",
    ),
    (OF_CACHE + "(q|k|v|kv|prob|qkv)_(cache_)?scale$", are_scales, "a scale of the KV cache is not a positive number"),
    (OF_CACHE + "(q|k|v)_(cache_)?zero_point$", are_finite, "a zero point of the KV cache is not finite"),
    # Of activations, which are not quantised here, or by scales of their own.
    (r"_proj\.(input|output)_scale$", are_scales, "a scale of activations is not a positive number"),
    (r"_proj\.(input|output)_zero_point$", are_finite, "a zero point of activations is not finite"),
    (ATTENTION + "bias$", is_causal_mask, "a mask hides other tokens than those that come later"),
    (ATTENTION + "masked_bias$", is_masking_value, "the value of masked scores is not a large negative number"),
)
"""(names, whether a tensor of such a name changes nothing, the doubt if not)."""
