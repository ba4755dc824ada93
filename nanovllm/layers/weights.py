"""The meeting place of layers and loader: which part of which checkpoint tensor goes where."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class WeightTarget:
    """A place to fill: `view.copy_(checkpoint[name][slices])`.

    Attributes:
        view: part of a parameter.
        shape: what the checkpoint's whole tensor must measure.
        slices: the part of it that belongs here (this rank's shard).
    """

    view: Tensor
    shape: tuple[int, ...]
    slices: tuple[slice, ...]


NamedTargets = Iterator[tuple[str, WeightTarget]]
"""(checkpoint name, target) of all that a layer needs; together they cover its parameters exactly once."""


class ShardedLayer(nn.Module):
    """A layer of whose parameters each rank may hold only a part."""

    def weight_targets(self, path: str, names: Collection[str]) -> NamedTargets:
        """What it needs of a checkpoint.

        Args:
            path: the layer's in the model, as checkpoints call it: "model.layers.0.self_attn.o_proj".
            names: of the checkpoint's tensors, where it may have one of several forms.
        """
        raise NotImplementedError


def whole(view: Tensor) -> WeightTarget:
    """A tensor that every rank holds entirely."""
    return WeightTarget(view, tuple(view.shape), (slice(None),) * view.dim())
