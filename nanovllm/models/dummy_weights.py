"""Random weights, for measuring without a checkpoint: load_format="dummy"."""

from collections.abc import Callable

import torch

from nanovllm.models.causal_lm import CausalLM


def fill_randomly(model: CausalLM, seed: int, std: float, check: Callable[[], None] = lambda: None) -> None:
    """Make normal matrices, norms of one, and biases of zero.

    Args:
        check: as for `load_weights`.
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
