"""A rank's number, its share of each layer, and its collectives."""

from collections.abc import Callable

from torch import Tensor


class Parallel:
    """One rank alone. A group of several overrides the collectives, and all its ranks call them in the same order.

    Attributes:
        rank: the number of this process in its engine.
        size: how many ranks share each layer.
        share: which of the `size` shares of a layer this rank has.
        ranks_per_device: how many ranks share this rank's device and its memory.
        raise_failure: raises the failure of another rank, if one is known. Loading calls it before each tensor, so that
            it ends. An exception from the thread that notices the failure could arrive anywhere, in a library's
            clean-up, too.
        sends_nothing: True while steps run on fake tensors, which have shapes but no values. The collectives then
            return tensors of the right shape at once.
    """

    sends_nothing = False

    def __init__(self, rank: int = 0, size: int = 1, ranks_per_device: int = 1) -> None:
        self.rank = rank
        self.size = size
        self.share = rank % size
        self.ranks_per_device = ranks_per_device
        self.raise_failure: Callable[[], None] = lambda: None

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

    def shard(self, total: int, what: str) -> tuple[int, int]:
        """Return (start, length) of this rank's equal share of total; raises a ValueError if it does not divide."""
        if total % self.size:
            raise ValueError(
                f"{what} is {total}, which {self.size} ranks cannot share evenly: change tensor_parallel_size"
            )
        length = total // self.size
        return self.share * length, length
