"""Stands in for torch's NCCL group: gloo carries the tensors, and the rules are NCCL's on the current stream."""

import threading
from collections import deque
from typing import Any

import torch.distributed as dist

from helpers.rehearsal import card as cards
from helpers.rehearsal.timeline import RehearsalError


class PretendNccl:
    """Collectives of tensors on the card. They can be captured, and run at each replay."""

    class Options:
        _timeout: Any = None

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        gloo = dist.ProcessGroupGloo._Options()
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        gloo._timeout = options._timeout
        self._group = dist.ProcessGroupGloo(store, rank, size, gloo)
        self._rank = rank
        self._sent: deque[tuple[Any, Any]] = deque(maxlen=16)
        """Broadcasts that may be under way, with what they send."""
        self._aborted = threading.Event()

    def _do(self, name: str, tensors: Any, options: Any) -> None:
        """Run a collective on the current stream."""
        if options.asyncOp:
            raise RehearsalError(f"{name} takes a stream of its own, which a capture would have to fork and to join")
        card = cards.current_card()
        card.launch(lambda *host: getattr(self._group, name)(*host, options).wait(), tensors)

    def allreduce(self, tensors: Any, options: Any) -> None:
        self._do("allreduce", (tensors,), options)

    def gather(self, outputs: Any, inputs: Any, options: Any) -> None:
        self._do("gather", (outputs, inputs), options)

    def broadcast(self, tensors: Any, options: Any) -> None:
        """Broadcast. The host does not wait for one that it sends, nor for the receivers."""
        if self._rank != options.rootRank or cards.current_card().local.graph is not None:
            self._do("broadcast", (tensors,), options)
            return

        def send(host: Any) -> None:
            copies = [tensor.clone() for tensor in host]
            self._sent.append((self._group.broadcast(copies, options), copies))

        cards.current_card().launch(send, (tensors,))

    def abort(self) -> None:
        self._aborted.set()
        self._group.abort()

    def shutdown(self) -> None:
        """Wait until all ranks have called this: for ever if one has died, unless another thread aborts."""
        try:
            self._group.barrier().wait()
        except RuntimeError:
            self._aborted.wait()
        self._group.shutdown()
