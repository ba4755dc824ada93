"""Refuses numbers of a configuration with which nothing can be computed: caps of scores and logits, and angles.

transformers computes with whatever stands there, and gives NaN, or numbers without a meaning.
"""

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nanovllm.utils.checks import as_number, quote, refuse

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CAP = re.compile("soft_?cap|logit_cap")
"""In the names of caps, in configurations of transformers' classes."""

FLOAT32 = torch.finfo(torch.float32)


def check_cap(value: Any, name: str) -> None:
    """Raise a ValueError for a cap with which float32 cannot compute cap * tanh(x / cap)."""
    if not FLOAT32.tiny <= as_number(value, name) <= FLOAT32.max:
        raise refuse(value, name, f"above 0 and finite: from {FLOAT32.tiny:.4g} to {FLOAT32.max:.4g}")


def check_numbers(config: "PretrainedConfig", model: nn.Module) -> None:
    """Raise a ValueError for a cap in a configuration, or for angles of its model, that are no numbers.

    A cap that has its class's own default is left alone: 0 means no cap there.
    """
    for name, value in config.to_dict().items():
        if CAP.search(name) and value is not None and value != getattr(type(config), name, None):
            check_cap(value, name)
    rope = getattr(config, "rope_parameters", None) or {}
    for name, value in list_values(rope):
        if isinstance(value, float) and not math.isfinite(value):
            raise refuse(value, f"{name} of the rope parameters", "finite")
    for name, buffer in model.named_buffers():
        if "inv_freq" in name and not bool(buffer.isfinite().all()):
            raise ValueError(
                f"some of its angles ({name}) are not finite: look at rope_theta and the factors of the rope "
                f"parameters, which are {quote(rope)}"
            )


def list_values(parameters: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of parameters, which may be nested."""
    for name, value in parameters.items():
        if isinstance(value, dict):
            yield from list_values(value)
        else:
            yield name, value
