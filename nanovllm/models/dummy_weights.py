"""Random weights, for measuring without a checkpoint: load_format="dummy"."""

from collections.abc import Callable

import torch

from nanovllm.models.decoder import Decoder


def fill_randomly(model: Decoder, *, seed: int, std: float, check: Callable[[], None] = lambda: None) -> None:
    """Fill matrices with normal numbers, norms with ones, and biases with zeros.

    Args:
        check: called before each parameter. It raises an exception if loading is to end.
        seed: of the numbers. Each rank has one of its own.
        std: the standard deviation of the numbers.
    """
    parameters = list(model.parameters())
    generator = torch.Generator(device=parameters[0].device).manual_seed(seed)
    for parameter in parameters:
        check()
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, std, generator=generator)
        else:
            parameter.data.fill_(1.0)
    for name, target in model.weight_targets():
        if name.endswith(".bias"):
            target.view.zero_()
