"""Which class runs which architecture."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanovllm.models.qwen3 import Qwen3ForCausalLM

ARCHITECTURES = {"Qwen3ForCausalLM": "nanovllm.models.qwen3"}


def model_class(architecture: str) -> "type[Qwen3ForCausalLM]":
    """The class for a name of ARCHITECTURES."""
    cls: Any = getattr(import_module(ARCHITECTURES[architecture]), architecture)
    return cls  # type: ignore[no-any-return]
