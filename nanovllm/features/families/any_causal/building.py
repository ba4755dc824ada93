"""Has transformers make a model: without memory, in bounded time, and without code that it would fetch from a hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

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
        with parameters_on_meta(), without_hub(), Frugal():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.get_default_dtype(), **code).eval()
            model.tie_weights()
        refuse_large_tables(model)
    except Exception as error:  # whatever their code raises for values that contradict each other
        raise ValueError(f"transformers cannot make a model of {type(config).__name__}: {error}") from error
    return model


MOST_PARAMETERS = 1 << 17
"""The most tensors of a model: several times those of any. Some number of config.json says how many are made."""

MOST_BYTES = 1 << 26
"""The most bytes of a table that is computed while a model is made, such as cosines of positions."""

FACTORIES = frozenset((torch.empty, torch.zeros, torch.ones, torch.full, torch.arange, torch.rand, torch.randn))


class Frugal(TorchFunctionMode):
    """Within, a tensor of more than `MOST_BYTES` gets no memory. Nearly all of these are parameters: some are made with
    zeros, and to write gigabytes of them would take a minute."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in FACTORIES:
            shape = function(*args, **kwargs | {"device": "meta"})
            if shape.nbytes > MOST_BYTES:
                return shape
        return function(*args, **kwargs)


def refuse_large_tables(model: nn.Module) -> None:
    """Raise a ValueError if a table is so large that it got no memory."""
    for name, table in model.named_buffers():
        if table.is_meta:
            raise ValueError(f"its table {name} would take {table.nbytes} bytes; it may take {MOST_BYTES}")


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Within, parameters are made without memory, and buffers (angles, factors) with their values."""
    from transformers.initialization import no_init_weights

    num_made = 0

    def move(module: nn.Module, name: str, value: nn.Parameter | None) -> nn.Parameter | None:
        nonlocal num_made
        if value is None or value.is_meta:  # a parameter that is tied stays the same one
            return value
        num_made += 1
        if num_made > MOST_PARAMETERS:
            raise ValueError(f"it has more than {MOST_PARAMETERS} tensors; no model has, so a number in it is wrong")
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
