"""Everything of torch.cuda that the engine calls, on a card that is not there."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from helpers.rehearsal import card as cards
from helpers.rehearsal.card import Calls, Card
from helpers.rehearsal.graphs import Graph, capture
from helpers.rehearsal.interpreter import extended
from helpers.rehearsal.nccl import PretendNccl
from helpers.rehearsal.timeline import Event, RehearsalError, Stream
from nanovllm.backends.gpu import cuda_graphs, startup, triton_shim

LAUNCHER = "import sys; fd, *sys.path = sys.argv[1:]; from helpers.rehearsal.follower import main; main(int(fd))"
"""A follower runs worker.py with these stand-ins."""
MIB = 1 << 20


def _number(device: Any, card: Card) -> int:
    """Return the number of a device, given as torch.cuda's functions take it."""
    if device is None:
        return card.local.device
    index = device if isinstance(device, int) else torch.device(device).index
    number = card.local.device if index is None else index
    if number >= card.num_devices:
        raise RehearsalError(f"there is no device {number}")
    return int(number)


@contextmanager
def _on_device(card: Card, device: Any) -> Iterator[None]:
    before = card.local.device
    card.local.device = _number(device, card)
    try:
        yield
    finally:
        card.local.device = before


@contextmanager
def _on_stream(card: Card, stream: Stream | None) -> Iterator[None]:
    if card.local.graph is not None:
        raise RehearsalError("another stream gets work within a capture")
    before = card.local.stream
    card.local.stream = stream
    try:
        yield
    finally:
        card.local.stream = before


def _functions(card: Card, capability: tuple[int, int]) -> dict[str, Any]:
    """Return the stand-ins of torch.cuda's functions and classes."""
    memory = card.memory

    def make_stream(device: Any = None, **others: Any) -> Stream:
        card.check_no_capture("makes a stream")
        return Stream(card.timeline, _number(device, card))

    def make_event(enable_timing: bool = False, **others: Any) -> Event:
        return Event(card.timeline, lambda: card.stream, enable_timing)

    def reset_peak(device: Any = None) -> None:
        memory.peak = memory.allocated

    def empty_cache() -> None:
        card.check_no_capture("gives memory back")
        memory.empty_cache()

    properties = SimpleNamespace(multi_processor_count=2, total_memory=memory.total, name="a card that is not there")
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: card.num_devices,
        "current_device": lambda: card.local.device,
        "set_device": lambda device: setattr(card.local, "device", _number(device, card)),
        "device": partial(_on_device, card),
        "get_device_capability": lambda device=None: capability,
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: properties.name,
        "mem_get_info": lambda device=None: (memory.free, memory.total),
        "memory_allocated": lambda device=None: memory.allocated,
        "max_memory_allocated": lambda device=None: memory.peak,
        "memory_reserved": lambda device=None: memory.reserved,
        "reset_peak_memory_stats": reset_peak,
        "empty_cache": empty_cache,
        "synchronize": lambda device=None: card.timeline.synchronize(),
        "Stream": make_stream,
        "Event": make_event,
        "stream": partial(_on_stream, card),
        "current_stream": lambda device=None: card.stream,
        "CUDAGraph": lambda: Graph(card),
        "graph": lambda graph, pool=None, stream=None, capture_error_mode="global": capture(
            card, graph, pool, stream, capture_error_mode
        ),
    }


def _run_with_calls(run: Callable[[threading.Thread], None], thread: threading.Thread) -> None:
    with Calls():
        run(thread)


@contextmanager
def rehearse(total: int = 96 * MIB, num_devices: int = 1, capability: tuple[int, int] = (9, 0)) -> Iterator[Card]:
    """Within, this process and its followers have a card of `total` bytes, and Triton's kernels are interpreted.

    The pass that compiles kernels is left out: the interpreter compiles nothing. tests/runner/test_launches.py has it.
    """
    card = Card(total, 2 * MIB, num_devices)
    make_generator = torch.Generator
    stand_ins = _functions(card, capability)
    run = threading.Thread.run
    cached = (triton_shim.num_multiprocessors, triton_shim.shared_memory_kib, cuda_graphs._capture_stream)
    with ExitStack() as stack:
        for name, stand_in in stand_ins.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        stack.enter_context(mock.patch.object(torch, "Generator", lambda device="cpu": make_generator()))
        stack.enter_context(mock.patch.object(dist, "ProcessGroupNCCL", PretendNccl, create=True))
        stack.enter_context(mock.patch.object(startup, "compile_kernels", lambda *arguments: None))
        if find_spec("nanovllm.features.distributed") is not None:
            stack.enter_context(mock.patch("nanovllm.features.distributed.follower_process.LAUNCHER", LAUNCHER))
        stack.enter_context(mock.patch.object(threading.Thread, "run", lambda self: _run_with_calls(run, self)))
        stack.enter_context(mock.patch.dict("os.environ", {"REHEARSAL": f"{total} {num_devices}"}))
        stack.enter_context(extended(card))
        cards.set_card(card)
        stack.callback(cards.set_card, None)
        for function in cached:
            function.cache_clear()
            stack.callback(function.cache_clear)
        stack.enter_context(Calls())
        yield card
        card.check_complaints()
