"""The collectives of a group of ranks, over NCCL or gloo, and the folder through which the ranks find each other."""

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import torch
import torch.distributed as dist
from torch import Tensor

from nanovllm.models.layers.parallel import Parallel
from nanovllm.utils.integers import ceil_div

if TYPE_CHECKING:
    from nanovllm.features.distributed.links import Link

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
TIMEOUT = timedelta(minutes=30)
"""The limit of one collective. The failure of a rank is noticed in other ways, and sooner: see follower_group.py."""
CONNECT_TIMEOUT = timedelta(minutes=1)
"""The limit for ranks that have loaded and only have to find each other."""


class FolderStore(dist.Store):  # type: ignore[misc, name-defined]  # torch gives it no type
    """The key-value store through which torch's process groups exchange addresses: a folder with a file per key.

    A file appears whole, by a rename. torch's own FileStore appends to one file: if a rank is killed while it writes an
    entry, the others read for ever, and hold Python's lock meanwhile.
    """

    def __init__(self, folder: Path, timeout: timedelta, prefix: str = "") -> None:
        """
        Args:
            prefix: begins each file's name, so that several groups can meet in a folder.
        """
        super().__init__()
        self._folder = folder
        self._timeout = timeout
        self._prefix = prefix

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value; raises an OSError if the folder is gone, which means that a rank has died."""
        scratch = self._folder / f"{os.getpid()}-{threading.get_ident()}.new"
        scratch.write_bytes(value.encode() if isinstance(value, str) else value)
        scratch.replace(self._path(key))

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value; raises an OSError after the timeout, or if the folder is gone."""
        self.wait([key])
        return self._path(key).read_bytes()

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are stored; raises as `get` does."""
        deadline = time.monotonic() + (timeout or self._timeout).total_seconds()
        for path in map(self._path, keys):
            while not path.exists():
                if time.monotonic() > deadline or not self._folder.is_dir():
                    raise OSError(f"{path} does not come")
                time.sleep(0.002)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are stored."""
        return all(self._path(key).exists() for key in keys)

    def _path(self, key: str) -> Path:
        return self._folder / quote(self._prefix + key, safe="")


class PeerLostError(RuntimeError):
    """A collective failed, most likely because another rank has died."""


def choose_device(device: torch.device, rank: int) -> torch.device:
    """Return the device of a rank, given rank 0's: one of its own while there are enough, else a shared one."""
    count = torch.get_device_module(device).device_count()
    return device if count == 1 else torch.device(device.type, ((device.index or 0) + rank) % count)


class GroupParallel(Parallel):
    """One rank of several. The group is no global of torch.distributed, so engines of several ranks live side by side.

    Collectives run on the current stream (`asyncOp = False`): with a stream of their own, which is torch's default, a
    captured CUDA graph would have a second branch at every collective. With gloo, tensors of a GPU are copied to the
    host and back, which a CUDA graph cannot capture.

    In a pipeline the ranks also send to each other, one to one: over NCCL by links (links.py), over gloo
    in this group.
    """

    def __init__(self, rank: int, size: int, backend: str, device: torch.device, is_pipeline: bool = False) -> None:
        """
        Args:
            backend: "nccl" or "gloo".
            device: the device of this rank.
        """
        super().__init__(rank, size, ceil_div(size, torch.get_device_module(device).device_count()))
        self._backend = backend
        self._device = device
        self._group: Any = None  # ProcessGroupGloo or ProcessGroupNCCL
        self._has_links = is_pipeline and backend == "nccl"
        self._links: dict[tuple[int, int], Link] = {}
        """This rank's links, by sender and receiver."""
        self._sum_options = _on_current_stream(dist.AllreduceOptions())
        self._minimum_options = _on_current_stream(dist.AllreduceOptions())
        self._minimum_options.reduceOp = dist.ReduceOp.MIN
        self._gather_options = _on_current_stream(dist.GatherOptions())
        self._broadcast_options = _on_current_stream(dist.BroadcastOptions())

    def connect(self, meeting: Path) -> None:
        """Connect to the other ranks; blocks until all of them have called this.

        Args:
            meeting: an empty folder, the same for all ranks.

        Raises:
            PeerLostError: a rank did not come.
        """
        try:
            self._group = self._make_group(FolderStore(meeting, CONNECT_TIMEOUT), self.rank, self.size)
            # The first collective opens the connections: do that here, not in the first step.
            self.all_reduce(torch.zeros(1, device=self._device))
            if self._has_links:
                self._connect_links(meeting)
        except (OSError, RuntimeError) as error:  # an OSError: the folder is gone
            raise PeerLostError(f"rank {self.rank} could not meet its peers: {error}") from error

    def _connect_links(self, meeting: Path) -> None:
        from nanovllm.features.distributed.links import Link

        x = torch.zeros(1, device=self._device)
        for sender in range(self.size):  # rank 0 comes first and last, so nobody waits in a circle
            ends = (sender, (sender + 1) % self.size)
            if self.rank in ends:
                store = FolderStore(meeting, CONNECT_TIMEOUT, "link {} {} ".format(*ends))
                link = Link(self._make_group(store, ends.index(self.rank), 2), self._device)
                self._links[ends] = link
                if self.rank == ends[0]:
                    link.send(x)
                else:
                    link.receive(x.shape, x.dtype)

    def _make_group(self, store: FolderStore, rank: int, size: int) -> Any:
        if self._backend == "gloo":
            gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
            gloo._timeout = TIMEOUT
            return dist.ProcessGroupGloo(store, rank, size, gloo)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # all ranks are on this machine
        # Rank 0 raises failures itself: torch's watchdog would end the process instead.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        torch.cuda.set_device(self._device)
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = TIMEOUT
        return dist.ProcessGroupNCCL(store, rank, size, nccl)

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.sends_nothing:
            return x
        near = self._make_reachable(x)
        self._finish(lambda: self._group.allreduce([near], self._sum_options))
        return near.to(x.device)

    def gather(self, x: Tensor) -> Tensor | None:
        if self.sends_nothing:
            return None if self.rank else torch.cat([x] * self.size, dim=-1)
        near = self._make_reachable(x)
        if self.rank:
            self._finish(lambda: self._group.gather([], [near], self._gather_options))
            return None
        parts = [torch.empty_like(near) for _ in range(self.size)]
        self._finish(lambda: self._group.gather([parts], [near], self._gather_options))
        return torch.cat(parts, dim=-1).to(x.device)

    def broadcast(self, x: Tensor) -> Tensor:
        if self.sends_nothing:
            return x
        near = self._make_reachable(x)
        self._finish(lambda: self._group.broadcast([near], self._broadcast_options))
        return near.to(x.device)

    def start_send(self, x: Tensor, rank: int) -> tuple[Any, Tensor] | None:
        """Start to send x to another rank, and return at once.

        Returns:
            What `end_send` takes; None if there is nothing to wait for, as with NCCL, where only streams wait.
        """
        near = self._make_reachable(x)
        if self._has_links:
            return self._try(lambda: self._links[self.rank, rank].send(near))
        return self._try(lambda: self._group.send([near], rank, 0)), near

    def end_send(self, sent: tuple[Any, Tensor]) -> None:
        """Wait until the receiver has taken what `start_send` sends."""
        self._finish(lambda: sent[0])

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> Tensor:
        """Return the next tensor that another rank sends here: the host waits for gloo's, the current stream for
        NCCL's."""
        if self._has_links:
            return self._try(lambda: self._links[rank, self.rank].receive(shape, dtype))
        x = torch.empty(shape, dtype=dtype)
        self._finish(lambda: self._group.recv([x], rank, 0))
        return x.to(self._device)

    def minimum(self, value: int) -> int:
        x = torch.tensor([value], dtype=torch.int64, device="cpu" if self._backend == "gloo" else self._device)
        self._finish(lambda: self._group.allreduce([x], self._minimum_options))
        return int(x.item())

    def _make_reachable(self, x: Tensor) -> Tensor:
        """Return x where the group can read it: on the host for gloo, else contiguous on its device."""
        return (x.cpu() if self._backend == "gloo" else x).contiguous()

    def _finish(self, start: Callable[[], Any]) -> None:
        """Start a collective and wait for it: the host for gloo's, the current stream for NCCL's.

        NCCL returns no work to wait for: the collective is on the current stream already.
        """
        work = self._try(start)
        if work is not None:
            self._try(work.wait)

    def _try(self, call: Callable[[], T]) -> T:
        """Return what `call` returns. If it fails, raise a PeerLostError."""
        try:
            return call()
        except RuntimeError as error:
            raise PeerLostError(f"rank {self.rank} lost its peers: {error}") from error

    def abort(self) -> None:
        """Make the collectives under way end, whatever they computed; any thread may call it."""
        groups = self._list_groups()  # close() may let go of them meanwhile
        if self._backend == "nccl":
            for group in groups:
                group.abort()

    def close(self) -> None:
        """Leave the group. CUDA graphs that hold its collectives must have been released before.

        NCCL's shutdown waits for every rank, and so for ever if one has died. Its abort waits for nobody.
        """
        groups = self._list_groups()
        self._links = {}
        self._group = None
        for group in groups:
            if self._backend == "nccl":
                group.abort()
            else:
                group.shutdown()

    def _list_groups(self) -> list[Any]:
        """Return the groups that this rank is in, those of its links first."""
        groups = [link.group for link in self._links.values()]
        return [*groups, self._group] if self._group is not None else groups


def _on_current_stream(options: Any) -> Any:
    """Return a collective's options, changed so that NCCL runs it on the current stream, not on one of its own."""
    options.asyncOp = False
    return options
