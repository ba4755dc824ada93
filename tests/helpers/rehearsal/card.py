"""A GPU whose memory is the host's. Its tensors say that they are on it; work on them is done at once, or captured.

Every call of torch passes through `Card.call`. It raises a RehearsalError for what CUDA would refuse, or would do at
another time than the program expects.
"""

import re
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from helpers.rehearsal.graphs import Graph
from helpers.rehearsal.memory import CountedMemory, Memory
from helpers.rehearsal.timeline import RehearsalError, Stream, Time, Timeline, has_passed

CPU = torch.device("cpu")

_READS = {"item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "__contains__"}
_READS |= {"nonzero", "unique", "equal", "allclose", "masked_select", "is_nonzero", "__repr__", "argwhere"}
"""Functions that give the host a value, or a shape that depends on one: it waits for the device."""
_SENDERS = {"tensor", "as_tensor", "asarray"}
_FACTORIES_OF_NOTHING = {"empty", "empty_like", "new_empty", "empty_strided"}
_IN_PLACE = re.compile(r"[a-z]\w*[^_]_|__setitem__|__i(add|sub|mul|truediv|floordiv|and|or|xor)__")


class CardTensor(Tensor):
    """A tensor on the card: the host's memory, but it says that it is on the card."""

    _memory: Memory

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return current_card().call(function, args, kwargs or {})

    def record_stream(self, stream: Any) -> None:  # torch's own takes no other class of streams than its own
        self._memory.record(stream)


class PinnedTensor(Tensor):
    """Pinned memory of the host."""

    _memory: Memory

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return current_card().call(function, args, kwargs or {})


class Calls(TorchFunctionMode):
    """Passes every call of torch in this thread to the card, factories too."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return current_card().call(function, args, kwargs or {})


class Copy(NamedTuple):
    """A copy between pinned memory and the card that may be under way.

    Attributes:
        time: when it has ended.
        memory: the pinned memory.
        sent: what a copy to the card has sent, and where from: the host must not write there before it has ended.
        received: where a copy to the host goes, and what comes: it is there when the copy has ended.
    """

    time: Time
    memory: Memory
    sent: tuple[Tensor, Tensor] | None = None
    received: tuple[Tensor, Tensor] | None = None


class Local(threading.local):
    """Holds what each thread of the host has of its own."""

    device = 0
    graph: Graph | None = None
    """The graph that this thread captures."""
    stream: Stream | None = None
    """None is the default stream."""


def plain(x: Any) -> Any:
    """Return x with tensors of the card, and pinned ones, as the host's tensors that they are."""
    return tree_map(lambda t: t.as_subclass(Tensor) if isinstance(t, (CardTensor, PinnedTensor)) else t, x)


def tensors(x: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor)]


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Card:
    """One or several cards of a process, with their memory counted as one."""

    def __init__(self, total: int, others: int, num_devices: int) -> None:
        self.memory = CountedMemory(total, others)
        self.num_devices = num_devices
        self.local = Local()
        self.timeline = Timeline(self.check_no_capture, self._settle)
        self.default_stream = Stream(self.timeline, 0)
        self.captured: list[weakref.ref[Memory]] = []
        self.num_launches = 0
        """Of Triton's kernels, outside replays."""
        self._copies: list[Copy] = []

    # ---- the order of work

    @property
    def stream(self) -> Stream:
        return self.local.stream or self.default_stream

    def check_no_capture(self, what: str) -> None:
        if self.local.graph is not None:
            raise RehearsalError(f"the host {what} within a capture")

    def use(self, memories: Iterable[Memory]) -> Time:
        """Add a piece of work that uses memory to the current stream; returns the time after it."""
        self.check_complaints()
        stream = self.stream
        time = stream.work()
        for memory in memories:
            memory.use(stream, self.timeline, time)
        return time

    def check_complaints(self) -> None:
        if self.memory.complaints:
            raise RehearsalError(self.memory.complaints.pop())

    def wait(self, what: str) -> None:
        """Have the host wait for the current stream, as it must to read a value."""
        self.check_no_capture(what)
        self.timeline.host_learns(self.stream.now())

    def _settle(self) -> None:
        ended = [copy for copy in self._copies if has_passed(copy.time, self.timeline.host)]
        self._copies = [copy for copy in self._copies if not has_passed(copy.time, self.timeline.host)]
        for copy in ended:
            with torch._C.DisableTorchFunction(), torch.inference_mode():
                if copy.received is not None:
                    copy.received[0].copy_(copy.received[1])
                was_kept = copy.sent is None or torch.equal(*(tensor.view(torch.uint8) for tensor in copy.sent))
            if not was_kept:
                raise RehearsalError("the host wrote into pinned memory before the copy from there had ended")

    def _check_copied(self, tensor: Tensor) -> None:
        """Raise if a copy from or to this pinned tensor may be under way."""
        for copy in self._copies:
            if copy.memory is tensor._memory:
                raise RehearsalError("the host uses pinned memory before a copy there has ended: it awaited no event")

    # ---- calls of torch

    def call(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Do what function(*args, **kwargs) does on a GPU."""
        with torch._C.DisableTorchFunctionSubclass():
            given = tensors((args, kwargs))
            own = [tensor for tensor in given if isinstance(tensor, CardTensor)]
            name = getattr(function, "__name__", "")
            if name in ("to", "cpu", "cuda", "copy_", "pin_memory"):
                return self._copy(name, function, args, kwargs)
            device = kwargs.get("device")
            is_for_card = device is not None and torch.device(device).type == "cuda"
            if kwargs.pop("pin_memory", False):
                return self._pin(function(*args, **kwargs))
            if not own and not is_for_card:
                return self._call_on_host(name, function, args, kwargs)
            if name == "__get__":
                return self._get(function, own[0])
            if name == "get_device":
                return self.local.device
            if name == "is_pinned":
                return False
            if name == "__set__":
                return function(*args)
            if device is not None:
                kwargs = {**kwargs, "device": CPU}
                if not is_for_card:
                    return function(*plain(args), **plain(kwargs))
            if name in _SENDERS:
                self.wait("copies from pageable memory")
            self._check_host_tensors(name, given, args, own)
            if name in _READS:
                self.wait(f"reads a value ({name})")
                self.use({id(tensor._memory): tensor._memory for tensor in own}.values())
                self.wait("reads a value")
                return self._wrap(function(*plain(args), **plain(kwargs)), own)
            return self.work(name, function, args, kwargs)

    def _get(self, function: Any, tensor: Tensor) -> Any:
        """Return an attribute of a tensor on the card."""
        if function == Tensor.device.__get__:
            return torch.device("cuda", self.local.device)
        if function == Tensor.is_cuda.__get__:
            return True
        if function == Tensor.is_cpu.__get__:
            return False
        return self._wrap(function(tensor.as_subclass(Tensor)), [tensor])

    def _check_host_tensors(self, name: str, given: list[Tensor], args: Any, own: list[Tensor]) -> None:
        """Raise if a piece of work has tensors of both host and card, or waits to learn a shape."""
        on_host = [tensor for tensor in given if not isinstance(tensor, CardTensor) and tensor.dim()]
        is_index = name in ("__getitem__", "__setitem__", "index_put_")
        if name.endswith("_like") or name.startswith("new_"):
            return  # of a tensor from elsewhere it takes no more than the shape and the type
        if on_host and not is_index:
            raise RuntimeError(f"{name}: expected all tensors to be on the same device, but found cuda:0 and cpu")
        if on_host:
            self.wait("sends an index from pageable memory")
        if is_index and any(index.dtype == torch.bool for index in tensors(args[1])):
            self.wait("learns how many elements a mask chooses")

    def _call_on_host(self, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        pinned = [tensor for tensor in tensors((args, kwargs)) if isinstance(tensor, PinnedTensor)]
        if not pinned:
            return function(*args, **kwargs)
        if name == "is_pinned":
            return True
        result = function(*plain(args), **plain(kwargs))
        if name in _READS or _IN_PLACE.fullmatch(name):
            self._check_copied(pinned[0])
        return tree_map(lambda x: self._alias(x, pinned, PinnedTensor), result)

    def work(self, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        """Do, or capture, a piece of work on the card: an operator of torch, or anything that is launched."""
        own = [tensor for tensor in tensors((args, kwargs)) if isinstance(tensor, CardTensor)]
        inputs = {address(tensor) for tensor in own}
        host_args = plain(args)
        host_kwargs = plain(kwargs)
        graph = self.local.graph
        is_in_place = _IN_PLACE.fullmatch(name) is not None
        result = None
        if graph is None or not is_in_place:
            result = function(*host_args, **host_kwargs)
        found = tensors(result)
        fresh = [] if is_in_place else [i for i, tensor in enumerate(found) if address(tensor) not in inputs]
        made = [found[i] for i in fresh]
        if is_in_place:
            result = args[0]
        elif graph is not None:
            for tensor in made:  # nothing was computed: indices of 0 are valid, and everything else is NaN
                tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
        result = self._wrap(result, own)
        if not is_in_place and (not fresh or name in _FACTORIES_OF_NOTHING):
            return result  # a view, or a fact about a tensor
        used = {id(t._memory): t._memory for t in (*own, *tensors(result)) if isinstance(t, CardTensor)}
        if graph is None:
            self.use(used.values())
            return result

        def do_again() -> None:
            again = tensors(function(*host_args, **host_kwargs))
            for tensor, i in zip(made, fresh, strict=True):
                tensor.copy_(again[i])

        graph.add(do_again, list(used.values()))
        return result

    def launch(self, run: Callable[..., Any], args: Any) -> None:
        """Do, or capture, the launch of a kernel: run(*args)."""
        given = tensors(args)
        if any(not isinstance(tensor, CardTensor) for tensor in given):
            raise RehearsalError("a kernel gets a pointer to the host's memory")
        with torch._C.DisableTorchFunctionSubclass():
            host_args = plain(args)
            if self.local.graph is not None:
                self.local.graph.add(lambda: run(*host_args), [tensor._memory for tensor in given])
                return
            self.num_launches += 1
            self.use({id(tensor._memory): tensor._memory for tensor in given}.values())
            run(*host_args)

    # ---- copies

    def _copy(self, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        """Do what Tensor.to, cpu, cuda, copy_ and pin_memory do."""
        source = args[1] if name == "copy_" else args[0]
        if name == "pin_memory":
            return self._pin(source.clone())
        if name == "copy_":
            to_card = isinstance(args[0], CardTensor)
        else:
            to_card, args, kwargs = self._read_target(name, source, args, kwargs)
        if to_card and isinstance(source, CardTensor):
            return self.work(name, function, args, kwargs)
        if not to_card and not isinstance(source, CardTensor):
            return self._call_on_host(name, function, args, kwargs)
        is_blocking = not kwargs.get("non_blocking", False)
        if name == "copy_":
            target = args[0]
        else:
            target = torch.empty_like(function(*plain(args), **plain(kwargs)))  # of the right dtype
            target = self._wrap(target, []) if to_card else target
        if to_card:
            self._send(target, source, is_blocking)
        else:
            self._receive(target, source, is_blocking)
        return target

    def _read_target(self, name: str, source: Tensor, args: Any, kwargs: Any) -> tuple[bool, Any, Any]:
        """Return whether a copy goes to the card, and its arguments with the CPU in the place of that."""
        is_card = isinstance(source, CardTensor) if name == "to" else name == "cuda"
        kept = [args[0]]
        for arg in args[1:]:
            if isinstance(arg, (str, torch.device)):
                is_card = torch.device(arg).type == "cuda"
                arg = CPU if is_card else arg
            elif isinstance(arg, Tensor):
                is_card = isinstance(arg, CardTensor)
            kept.append(arg)
        if kwargs.get("device") is not None:
            is_card = torch.device(kwargs["device"]).type == "cuda"
            kwargs = {**kwargs, "device": CPU if is_card else kwargs["device"]}
        return is_card, tuple(kept), kwargs

    def _send(self, target: Tensor, source: Tensor, is_blocking: bool) -> None:
        """Copy from the host to the card."""
        values = source.as_subclass(Tensor)
        if not isinstance(source, PinnedTensor):
            self.wait("copies from pageable memory")
        time = self.use([target._memory])
        target.as_subclass(Tensor).copy_(values)
        if isinstance(source, PinnedTensor):
            self.check_no_capture("copies from pinned memory, which is read again at each replay,")
            sent = (values, values.clone()) if values.is_contiguous() and values.dim() else None
            self._copies.append(Copy(time, source._memory, sent=sent))
        if is_blocking:
            self.wait("waits for a copy")

    def _receive(self, target: Tensor, source: Tensor, is_blocking: bool) -> None:
        """Copy from the card to the host."""
        self.check_no_capture("reads a tensor")
        values = source.as_subclass(Tensor).clone()
        time = self.use([source._memory])
        place = target.as_subclass(Tensor)
        if isinstance(target, PinnedTensor):
            place.fill_(float("nan") if place.is_floating_point() else -7777)
            self._copies.append(Copy(time, target._memory, received=(place, values)))
        else:
            place.copy_(values)
            is_blocking = True
        if is_blocking:
            self.wait("waits for a copy")

    # ---- tensors

    def _pin(self, tensor: Tensor) -> Tensor:
        self.check_no_capture("pins memory")
        made = tensor.as_subclass(PinnedTensor)
        made._memory = Memory(0, None, None, 0)
        return made

    def _wrap(self, result: Any, own: list[Tensor]) -> Any:
        """Return a result with its tensors on the card: in the memory of one of `own`, or in new memory."""
        return tree_map(lambda x: self._alias(x, own, CardTensor), result)

    def _alias(self, x: Any, own: list[Tensor], kind: type[Tensor]) -> Any:
        if not isinstance(x, Tensor):
            return x
        if isinstance(x, (CardTensor, PinnedTensor)):
            return x
        where = address(x)
        memory = next((tensor._memory for tensor in own if address(tensor) == where and where), None)
        if memory is None and kind is PinnedTensor:
            return x
        if memory is None:
            num_bytes = x.untyped_storage().nbytes()
            graph = self.local.graph
            counted = self.memory
            if graph is None:
                memory = Memory(num_bytes, counted, counted.pools[0], 0, self.stream)
            else:
                memory = graph.allocate(num_bytes)
        made = x.as_subclass(kind)
        made._memory = memory  # type: ignore[attr-defined]
        return made


_card: Card | None = None


def current_card() -> Card:
    if _card is None:
        raise RehearsalError("a tensor of a card outlives the rehearsal")
    return _card


def set_card(card: Card | None) -> None:
    global _card
    _card = card
