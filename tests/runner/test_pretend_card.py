"""The rehearsal's card complains about what CUDA would refuse, or would do at another time than is meant."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from helpers.rehearsal import RehearsalError, rehearse
from helpers.rehearsal.card import Card

CUDA = torch.device("cuda")
MIB = 1 << 20


@pytest.fixture
def card() -> Iterator[Card]:
    with rehearse() as card, torch.inference_mode():
        yield card


def capture(work: Callable[[], Any], pool: Any = None) -> tuple[Any, Any]:
    """Capture some work; returns its graph and its result."""
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        result = work()
    return graph, result


def test_tensors_say_that_they_are_on_the_card(card: Card) -> None:
    x = torch.ones(3, 2, device=CUDA)
    with torch.device("cuda"):
        y = torch.zeros(2)
    for tensor in (x, y, x[1:], x.t(), x @ y, torch.empty_like(x), x.new_zeros(1), torch.cat([x, x]), *x.unbind()):
        assert tensor.is_cuda and tensor.device == torch.device("cuda:0") and tensor.get_device() == 0
    host = x.cpu()
    assert not host.is_cuda and host.device.type == "cpu" and host.tolist() == [[1, 1]] * 3
    assert (x + 1).tolist() == [[2, 2]] * 3 and float(x.sum()) == 6
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3, 2)


def test_memory_is_counted_and_ends(card: Card) -> None:
    x = torch.zeros(MIB, dtype=torch.uint8, device=CUDA)
    assert torch.cuda.memory_allocated() == MIB
    view = x[5:]
    del x
    assert torch.cuda.memory_allocated() == MIB
    y = view + 1
    assert torch.cuda.memory_allocated() == torch.cuda.max_memory_allocated() == 2 * MIB
    del view
    del y
    assert torch.cuda.memory_allocated() == 0 and torch.cuda.memory_reserved() == 2 * MIB
    free, total = torch.cuda.mem_get_info()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info() == (free + 2 * MIB, total)
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(total, dtype=torch.uint8, device=CUDA)


def test_a_graph_replays_over_the_same_tensors(card: Card) -> None:
    x = torch.zeros(3, device=CUDA)
    table = torch.zeros(3, device=CUDA)

    def work() -> Any:
        y = (x + 1).view(3, 1) * 2
        table[torch.zeros(1, dtype=torch.int64, device=CUDA)] = y[0]
        return y

    graph, y = capture(work)
    assert table.tolist() == [0, 0, 0], "a capture computes nothing"
    with pytest.raises(RehearsalError, match="has not run yet"):
        y.tolist()
    for value in (1, 4):
        x.fill_(value)
        graph.replay()
        assert y.flatten().tolist() == [2 * value + 2] * 3 and table.tolist() == [2 * value + 2, 0, 0]


@pytest.mark.parametrize(
    ("work", "complaint"),
    [
        (lambda x: x.sum().item(), "reads a value"),
        (lambda x: bool(x.any()), "reads a value"),
        (lambda x: x[x > 0], "mask"),
        (lambda x: x.nonzero(), "reads a value"),
        (lambda x: x.cpu(), "reads a tensor"),
        (lambda x: torch.cuda.synchronize(), "synchronises"),
        (lambda x: torch.cuda.current_stream().synchronize(), "waits for a stream"),
        (lambda x: x.copy_(torch.zeros(3)), "pageable"),
        (lambda x: torch.zeros(3).to(CUDA), "pageable"),
        (lambda x: torch.tensor([1.0], device=CUDA) + x, "pageable"),
        (lambda x: x[torch.tensor([1])], "pageable"),
        (lambda x: torch.zeros(3).pin_memory(), "pins memory"),
        (lambda x: torch.cuda.Stream(), "makes a stream"),
        (lambda x: torch.cuda.empty_cache(), "gives memory back"),
    ],
)
def test_a_capture_refuses_what_waits_and_what_is_not_captured(
    work: Callable[[Any], Any], complaint: str, card: Card
) -> None:
    x = torch.ones(3, device=CUDA)
    work(x)
    with pytest.raises(RehearsalError, match=complaint):
        capture(lambda: work(x + 1))


def test_a_graph_s_outputs_are_gone_when_one_that_was_captured_before_has_run(card: Card) -> None:
    x = torch.ones(3, device=CUDA)
    first, y = capture(lambda: x + 1)
    second, z = capture(lambda: x + 2, pool=first.pool())
    first.replay()
    second.replay()
    assert y.tolist() == [2] * 3 and z.tolist() == [3] * 3, "the second was captured while y was there"
    first.replay()
    with pytest.raises(RehearsalError, match="overwritten"):
        z.tolist()
    second.replay()
    assert z.tolist() == [3] * 3


def test_a_graph_whose_input_is_freed_cannot_run(card: Card) -> None:
    inputs = [torch.ones(3, device=CUDA)]
    graph, y = capture(lambda: inputs[0] + 1)
    graph.replay()
    assert y.tolist() == [2] * 3
    inputs.clear()
    with pytest.raises(RehearsalError, match="freed"):
        graph.replay()
    graph.reset()
    with pytest.raises(RehearsalError, match="reset"):
        graph.replay()


def test_streams_need_an_event_or_a_wait_between_them(card: Card) -> None:
    other = torch.cuda.Stream()
    x = torch.ones(3, device=CUDA)
    with torch.cuda.stream(other), pytest.raises(RehearsalError, match="may still work"):
        x + 1
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        x += 1
        event = torch.cuda.Event()
        event.record()
    with pytest.raises(RehearsalError, match="may still work"):
        x + 1
    event.wait()
    assert (x + 1).tolist() == [3] * 3


def test_pinned_memory_is_not_touched_before_its_copy_has_ended(card: Card) -> None:
    pinned = torch.zeros(3, pin_memory=True)
    values = pinned.numpy()
    x = torch.zeros(3, device=CUDA)
    x.copy_(pinned, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    with pytest.raises(RehearsalError, match="awaited no event"):
        pinned.numpy()
    np.add(values, 1, out=values)
    with pytest.raises(RehearsalError, match="before the copy"):
        event.synchronize()


def test_a_copy_to_the_host_is_there_when_its_event_has_passed(card: Card) -> None:
    x = torch.ones(3, device=CUDA)
    host = torch.empty(3, pin_memory=True)
    host.copy_(x, non_blocking=True)
    x.zero_()
    with pytest.raises(RehearsalError, match="awaited no event"):
        host.tolist()
    torch.cuda.synchronize()
    assert host.tolist() == [1] * 3


def test_times_are_read_of_events_that_have_passed(card: Card) -> None:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.ones(3, device=CUDA)
    end.record()
    with pytest.raises(RehearsalError, match="before the host has waited"):
        start.elapsed_time(end)
    end.synchronize()
    assert start.elapsed_time(end) >= 0
