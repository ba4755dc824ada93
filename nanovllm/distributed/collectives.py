"""What the ranks compute together, over NCCL or gloo."""

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
import torch.distributed as dist
from torch import Tensor

from nanovllm.layers.parallel import Parallel

LOOPBACK = "127.0.0.1"
TIMEOUT = timedelta(minutes=30)
"""For one collective. Ranks that die, raise or stop are noticed otherwise, and sooner: see follower_group.py."""
CONNECT_TIMEOUT = timedelta(minutes=1)
"""For ranks that have loaded, and have only to find each other."""


class FolderStore(dist.Store):  # type: ignore[misc, name-defined]  # torch gives it no type
    """What the ranks tell each other before they are connected: a file for each key, in a folder of the user's alone.

    A file appears whole, by a rename. torch's own FileStore appends to one file: a rank that was killed in the midst of
    an entry makes the others read for ever, with Python's lock held.
    """

    def __init__(self, folder: Path, timeout: timedelta) -> None:
        super().__init__()
        self._folder, self._timeout = folder, timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Raises an OSError if the folder is gone, which says that a rank is."""
        scratch = self._folder / f"{os.getpid()}-{threading.get_ident()}.new"
        scratch.write_bytes(value.encode() if isinstance(value, str) else value)
        scratch.replace(self._path(key))

    def get(self, key: str) -> bytes:
        """The value, once it is there; an OSError as for `set`, and after the timeout."""
        self.wait([key])
        return self._path(key).read_bytes()

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until all keys are there; raises as `get` does."""
        deadline = time.monotonic() + (timeout or self._timeout).total_seconds()
        for path in map(self._path, keys):
            while not path.exists():
                if time.monotonic() > deadline or not self._folder.is_dir():
                    raise OSError(f"{path} does not come")
                time.sleep(0.002)

    def check(self, keys: list[str]) -> bool:
        return all(self._path(key).exists() for key in keys)

    def _path(self, key: str) -> Path:
        return self._folder / quote(key, safe="")


class PeerLostError(RuntimeError):
    """A collective failed, most likely because another rank has gone."""


def rank_device(device: torch.device, rank: int) -> torch.device:
    """Where a rank computes, given the device of rank 0: its own GPU while there are enough, else a shared one."""
    if device.type != "cuda":
        return device
    return torch.device("cuda", ((device.index or 0) + rank) % torch.cuda.device_count())


class GroupParallel(Parallel):
    """One of several ranks. The group is its own, no global of torch.distributed: engines live side by side.

    With gloo, tensors of a GPU go through the host, which a CUDA graph cannot capture.
    """

    def __init__(self, rank: int, size: int, backend: str, device: torch.device) -> None:
        """
        Args:
            backend: "nccl" or "gloo".
            device: this rank's.
        """
        shared_by = size if device.type == "cpu" else -(-size // torch.cuda.device_count())
        super().__init__(rank, size, ranks_per_device=shared_by)
        self._backend, self._device = backend, device
        self._group: Any = None  # ProcessGroupGloo or ProcessGroupNCCL

    def connect(self, meeting: Path) -> None:
        """Meet the other ranks; blocks until all have come.

        Args:
            meeting: an empty folder that all of them name.

        Raises:
            PeerLostError: one of them has not.
        """
        try:
            self._group = self._make_group(meeting)
        except RuntimeError as error:
            raise PeerLostError(f"rank {self.rank} could not meet its peers: {error}") from error
        # The first collective makes the connections: here, and not in the first step.
        self.all_reduce(torch.zeros(1, device=self._device))

    def _make_group(self, meeting: Path) -> Any:
        store = FolderStore(meeting, CONNECT_TIMEOUT)
        if self._backend == "gloo":
            gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
            gloo._timeout = TIMEOUT
            return dist.ProcessGroupGloo(store, self.rank, self.size, gloo)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # all ranks are on this machine
        # Failures are raised here, by rank 0: torch's watchdog would end the process instead.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        torch.cuda.set_device(self._device)
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = TIMEOUT
        return dist.ProcessGroupNCCL(store, self.rank, self.size, nccl)

    def all_reduce(self, x: Tensor) -> Tensor:
        near = self._near(x)
        self._wait(lambda: self._group.allreduce([near]))
        return near.to(x.device)

    def gather(self, x: Tensor) -> Tensor | None:
        near = self._near(x)
        options = dist.GatherOptions()
        if self.rank:
            self._wait(lambda: self._group.gather([], [near], options))
            return None
        parts = [torch.empty_like(near) for _ in range(self.size)]
        self._wait(lambda: self._group.gather([parts], [near], options))
        return torch.cat(parts, dim=-1).to(x.device)

    def broadcast(self, x: Tensor) -> Tensor:
        near = self._near(x)
        self._wait(lambda: self._group.broadcast([near], dist.BroadcastOptions()))
        return near.to(x.device)

    def minimum(self, value: int) -> int:
        x = torch.tensor([value], dtype=torch.int64, device="cpu" if self._backend == "gloo" else self._device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN  # type: ignore[assignment]  # the stub knows only its inner type
        self._wait(lambda: self._group.allreduce([x], options))
        return int(x.item())

    def _near(self, x: Tensor) -> Tensor:
        """x where the group can work on it."""
        return x.cpu() if x.is_cuda and self._backend == "gloo" else x.contiguous()

    def _wait(self, start: Callable[[], Any]) -> None:
        """NCCL: the current stream waits; gloo: the host does."""
        try:
            start().wait()
        except RuntimeError as error:
            raise PeerLostError(f"rank {self.rank} lost its peers: {error}") from error

    def abort(self) -> None:
        """Make collectives that are under way end, whatever their result; from any thread."""
        group = self._group  # close() may let go of it meanwhile
        if group is not None and self._backend == "nccl":
            group.abort()

    def close(self) -> None:
        """Leave the group. CUDA graphs that hold its collectives must be gone by now."""
        if self._group is not None:
            self._group.shutdown()
            self._group = None
