"""flash-attn on the card of a rehearsal: each call is one piece of work, which graphs can capture."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from helpers import fake_flash_attn
from helpers.rehearsal import card as cards


def _on_card(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        for tensor in cards.tensors((args, kwargs)):
            assert isinstance(tensor, cards.CardTensor), "flash-attn takes tensors on a GPU only"
        with torch._C.DisableTorchFunction():
            return cards.current_card().work(function.__name__, function, args, kwargs)

    return call


def make_module() -> ModuleType:
    """Return what `import flash_attn` is to give."""
    module = ModuleType("flash_attn")
    for function in (fake_flash_attn.flash_attn_varlen_func, fake_flash_attn.flash_attn_with_kvcache):
        setattr(module, function.__name__, _on_card(function))
    return module
