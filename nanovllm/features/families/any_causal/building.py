"""Has transformers make a model without memory, and without code that its package kernels would fetch from a hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def build(config: "PretrainedConfig") -> Any:
    """Return transformers' causal model of a configuration. Its parameters are on the meta device.

    Raises:
        ValueError: transformers cannot make it.
    """
    from transformers import AutoModelForCausalLM

    # Attention is ours later. batched_mm computes mixtures of experts that are not ours: it reads no values.
    code = {"attn_implementation": "eager", "experts_implementation": "batched_mm", "trust_remote_code": False}
    try:
        with parameters_on_meta(), without_hub():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.get_default_dtype(), **code).eval()
            model.tie_weights()
    except Exception as error:  # whatever their code raises for values that contradict each other
        raise ValueError(f"transformers cannot make a model of {type(config).__name__}: {error}") from error
    return model


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Within, parameters are made without memory, and buffers (angles, factors) with their values."""
    from transformers.initialization import no_init_weights

    def move(module: nn.Module, name: str, value: nn.Parameter | None) -> nn.Parameter | None:
        if value is None or value.is_meta:  # a parameter that is tied stays the same one
            return value
        return nn.Parameter(value.to("meta"), requires_grad=False)

    hook = register_module_parameter_registration_hook(move)  # type: ignore[arg-type]  # torch's type is wrong
    try:
        with no_init_weights(), torch.device("cpu"):
            yield
    finally:
        hook.remove()


@contextmanager
def without_hub() -> Iterator[None]:
    """Within, no module of transformers gets a kernel of a hub: that is native code of others."""
    from transformers.integrations import hub_kernels

    def refuse_kernel(name: str, *_: Any, **__: Any) -> None:
        raise ImportError(f"{name} is code of a hub, which is never run here")

    original = hub_kernels.get_kernel
    hub_kernels.get_kernel = refuse_kernel
    try:
        yield
    finally:
        hub_kernels.get_kernel = original
