"""A rank's number among those that share each layer, its stage if it is one of a pipeline, and its collectives."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Stage:
    """The layers that one rank of a pipeline computes: `first` to `end` - 1 of the model's `num_layers`.

    The first stage also has the embedding and the LM head. The last one also has the final norm.
    """

    first: int
    end: int
    num_layers: int

    @property
    def is_first(self) -> bool:
        return self.first == 0

    @property
    def is_last(self) -> bool:
        return self.end == self.num_layers


class Parallel:
    """One rank alone. A group of several overrides the collectives, and all its ranks call them in the same order.

    Attributes:
        ranks_per_device: how many ranks share this rank's device and its memory.
        stage: the layers of this rank; None if it has all of them.
        number: the number of this process in its engine: `rank`, or the number of its stage.
        num_transfers: how many steps' hidden states may be under way to or from this rank, beside the step's own.
        sends_nothing: True while steps run on fake tensors, which have shapes but no values. The collectives then
            return tensors of the right shape at once.
    """

    num_transfers = 0
    sends_nothing = False

    def __init__(self, rank: int = 0, size: int = 1, ranks_per_device: int = 1, stage: Stage | None = None) -> None:
        self.rank = rank
        self.size = size
        self.ranks_per_device = ranks_per_device
        self.stage = stage
        self.number = rank

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of x over the ranks; x may be overwritten."""
        return x

    def gather(self, x: Tensor) -> Tensor | None:
        """Return the x of all ranks, concatenated along the last dimension, on rank 0; None on the others."""
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Return rank 0's x on every rank; on the others x only gives shape and dtype, and may be overwritten."""
        return x

    def minimum(self, value: int) -> int:
        """Return the smallest of the ranks' values; waits for the device."""
        return value

    def bind_halves(
        self, decode: Callable[..., Any], sample: Callable[..., Any]
    ) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
        """Return the two halves of a decode step as CUDA graphs record them. A stage of a pipeline changes them."""
        return decode, sample

    def shard(self, total: int, what: str) -> tuple[int, int]:
        """Return (start, length) of this rank's equal share of total; raises a ValueError if it does not divide."""
        if total % self.size:
            raise ValueError(
                f"{what} is {total}, which {self.size} ranks cannot share evenly: change tensor_parallel_size"
            )
        length = total // self.size
        return self.rank * length, length
