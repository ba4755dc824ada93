"""How a layer says which part of which checkpoint tensor fills which of its parameters."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class WeightTarget:
    """A place to fill: `view.copy_(checkpoint[name][slices])`, and then `view += plus`.

    Attributes:
        view: part of a parameter.
        shape: the shape that the checkpoint's whole tensor must have.
        slices: the part of that tensor which belongs here: this rank's shard. An int takes a dimension away.
        plus: 1 for a norm that multiplies by 1 + weight; else 0.
        dtypes: the number formats that it may have in the checkpoint, as safetensors names them.
    """

    view: Tensor
    shape: tuple[int, ...]
    slices: tuple[slice | int, ...]
    plus: float = 0.0
    dtypes: tuple[str, ...] = FLOATS

    def fits(self, shape: Sequence[int]) -> bool:
        """Return whether a checkpoint's tensor may have this shape. A number may be stored without dimensions."""
        return (tuple(shape) or (1,)) == self.shape

    def fill(self, source: Any, copy: Callable[[Tensor, Tensor], object]) -> None:
        """Copy the slices of source, a tensor or a slice object of safetensors, by copy(place, values)."""
        if self.view.dim() < 3:
            copy(self.view, source[self.slices])
            if self.plus:
                self.view.add_(self.plus)
            return
        for i, matrix in enumerate(self.view):  # one expert at a time: a tensor that is read is in memory twice
            copy(matrix, source[i, *self.slices[1:]])


NamedTargets = Iterator[tuple[str, WeightTarget]]
"""(checkpoint name, target) of every tensor that a layer needs. The targets cover its parameters exactly once."""


class ShardedLayer(nn.Module):
    """A layer that may hold only a part of each parameter on each rank."""

    def list_matrices(self) -> tuple[nn.Parameter, ...]:
        """Return parameters [out, in], or [n, out, in] of n matrices each, that may be packed in another form.

        A backend may pack each of the n matrices in place after loading.
        """
        return ()

    def list_packed(self) -> Sequence[Any]:
        """Return the packed forms that are multiplied in place of `list_matrices()`; () if these are multiplied."""
        return ()

    def set_packed(self, packed: Sequence[Any], empty: nn.Parameter) -> None:
        """Have packed forms multiplied in place of `list_matrices()`. The parameters become `empty`."""
        raise NotImplementedError

    def count_state(self) -> int:
        """Return how many numbers a row's state has that each token is multiplied with; 0 without a state."""
        return 0

    def weight_targets(self, path: str, names: Collection[str]) -> NamedTargets:
        """Yield (checkpoint name, target) of every tensor that the layer needs.

        Args:
            path: the layer's name in checkpoints, such as "model.layers.0.self_attn.o_proj".
            names: the names of the checkpoint's tensors, for layers that are stored in one of several forms.
        """
        raise NotImplementedError


def make_whole_target(view: Tensor, plus: float = 0.0) -> WeightTarget:
    """Return the target of a tensor that every rank holds entirely."""
    return WeightTarget(view, tuple(view.shape), (slice(None),) * view.dim(), plus)


class Quantizer(Protocol):
    """Gives one rank's model quantised matrices: a `ModelQuantizer`. In each method `model` is a decoder."""

    @property
    def rounds_at_load(self) -> bool:
        """Whether codes are made of a checkpoint's numbers by rounding, so that new weights may come."""

    def count_bytes(self, model: Any, itemsize: int) -> int:
        """Return the memory of a model's weights, if those that are not quantised take `itemsize` bytes each."""

    def list_matrices(self, model: Any) -> list[nn.Parameter]:
        """Return the parameters that get no memory, because codes take their place."""

    def find_targets(self, model: Any, names: Collection[str]) -> NamedTargets:
        """Yield what `model.weight_targets` yields, with other targets where a matrix is quantised."""

    def begin(self, model: Any, attaches: bool = True) -> Any:
        """Return the `Filling` that collects the codes of a model's matrices, and fills them once."""
