"""Weights in the form that a backend multiplies fastest."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from nanovllm.layers.embedding import LMHead, VocabParallelEmbedding
from nanovllm.layers.matrix import MatrixModule, PackedMatrix


def pack_matrices(
    modules: Iterable[nn.Module], pack: Callable[[Tensor], PackedMatrix], check: Callable[[], None]
) -> None:
    """Pack every matrix that is multiplied, one after another, and let go of what nothing reads any more."""
    matrices = [module for module in modules if isinstance(module, MatrixModule)]
    embeddings = [m for m in matrices if isinstance(m, VocabParallelEmbedding) and not isinstance(m, LMHead)]
    for module in matrices:
        if module in embeddings or module.weight.shape[1] % 2:  # packed forms hold pairs of input features
            continue
        check()
        weight = module.weight
        module.packed = packed = pack(weight.data)
        readers = [embedding for embedding in embeddings if embedding.weight is weight]
        if not readers or packed.rows(torch.zeros(1, dtype=torch.int32)) is not None:
            for owner in (module, *readers):
                owner.packed, owner.weight = packed, nn.Parameter(weight.new_empty(0), requires_grad=False)
