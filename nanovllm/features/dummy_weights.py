"""Random weights, for measuring without a checkpoint: load_format="dummy"."""

import torch

from nanovllm.models.decoder import Decoder
from nanovllm.models.layers.parallel import Parallel
from nanovllm.models.layers.weights import Quantizer
from nanovllm.models.weight_names import find_weight_targets


def fill_randomly(model: Decoder, parallel: Parallel, quantizer: Quantizer | None, *, seed: int, std: float) -> None:
    """Fill matrices with normal numbers, norms with ones, and biases with zeros.

    Args:
        quantizer: quantises the same numbers.
        seed: the seed of rank 0. Each rank has one of its own.
        std: the standard deviation of the numbers.
    """
    biases = [target.view for name, target in find_weight_targets(model) if name.endswith(".bias")]
    device = model.cos_sin.device
    generator = torch.Generator(device=device).manual_seed(seed + parallel.rank)
    filling = None if quantizer is None else quantizer.begin(model)
    for name, parameter in list(model.named_parameters()):
        parallel.raise_failure()
        if parameter.dim() == 1:
            parameter.data.fill_(1.0)
        elif filling is not None and parameter.is_meta:
            values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            values.normal_(0.0, std, generator=generator)
            filling.fill(name.rpartition(".")[0], values, parameter)
        else:
            parameter.data.normal_(0.0, std, generator=generator)
    for bias in biases:
        bias.zero_()
