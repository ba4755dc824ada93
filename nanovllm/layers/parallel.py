"""A rank's place among those that share each layer, and what the layers ask of the group."""

from torch import Tensor


class Parallel:
    """One rank alone. Groups of several override the collectives, which all ranks call in the same order.

    Attributes:
        ranks_per_device: how many of them share this rank's memory.
    """

    def __init__(self, rank: int = 0, size: int = 1, ranks_per_device: int = 1) -> None:
        self.rank, self.size, self.ranks_per_device = rank, size, ranks_per_device

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks; may be written in place."""
        return x

    def gather(self, x: Tensor) -> Tensor | None:
        """x of all ranks side by side along the last dimension, on rank 0; None elsewhere."""
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """x of rank 0, which on the others tells shape and dtype; may be written in place."""
        return x

    def minimum(self, value: int) -> int:
        """The smallest of the ranks' values; waits for the device."""
        return value

    def shard(self, total: int, what: str) -> tuple[int, int]:
        """(start, length) of this rank's equal share of total; ValueError if it does not divide."""
        if total % self.size:
            raise ValueError(
                f"{what} is {total}, which {self.size} ranks cannot share evenly: change tensor_parallel_size"
            )
        length = total // self.size
        return self.rank * length, length
