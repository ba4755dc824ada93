"""Launching Triton kernels: compiled once, in parallel if they are known beforehand, and then launched directly."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor
from tqdm import tqdm

from nanovllm.kernels.triton_shim import INTERPRETED, LAUNCHES_DIRECTLY, tl, triton


class Launch(NamedTuple):
    """One launch. args: all pointers first, then numbers; config: the constexprs, then num_warps and num_stages."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    config: dict[str, int]


_compiled: dict[tuple[Any, ...], tuple[Any, ...]] = {}
_noted: ContextVar[Callable[[Launch], object] | None] = ContextVar("noted", default=None)
"""Who is told of launches instead of their being done; another thread's launches go on."""


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr):
    """The first statement of every kernel: nothing is read or written before what the stream did before is done.

    With programmatic dependent launch (PDL) a kernel's programs may be started while its predecessor still runs, which
    hides what a start costs; all of them wait here, so whoever waits for this kernel has waited for all before it.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@cache
def _dependent_launches(device: int) -> dict[str, int]:
    """The options of a launch that say whether it is a programmatic dependent one: from sm_90 on."""
    if INTERPRETED or not LAUNCHES_DIRECTLY:  # all versions that are known know it
        return {"PDL": False}
    has_it = triton.runtime.driver.active.get_current_target().arch >= 90
    return {"PDL": has_it, "launch_pdl": has_it}


def launch(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], config: dict[str, int]) -> None:
    """`kernel[grid](*args, **config)`, in less than half of the 10 microseconds and more that Triton takes for that.

    Triton derives anew, at each launch, what to compile. Here the same is told from the constexprs, the pointers' types
    and the numbers that the kernel is specialised on. Pointers are all but always multiples of 16; where one is not, or
    this version of Triton is unknown, Triton does it. Launch hooks, which profilers hang on Triton, are not called.
    """
    device = args[0].get_device()
    config = {**config, **_dependent_launches(device)}
    if (note := _noted.get()) is not None:
        note(Launch(kernel, grid, args, config))
        return
    if INTERPRETED or not LAUNCHES_DIRECTLY:
        kernel[grid](*args, **config)
        return
    pointers, aligned, numbers, constexprs = _parameters(kernel)
    bits = 0
    for i in aligned:
        bits |= args[i].data_ptr()
    if bits % 16:
        kernel[grid](*args, **config)
        return
    types = [pointer.dtype for pointer in args[:pointers]]
    key = (kernel.__name__, device, *config.values(), *types, *[args[i] for i in numbers])
    found = _compiled.get(key)
    if found is None:
        made = kernel[grid](*args, **config)
        _compiled[key] = made.run, made.function, made.packed_metadata, tuple(config[name] for name in constexprs)
        return
    run, function, metadata, constants = found
    second = grid[1] if len(grid) > 1 else 1
    stream = triton.runtime.driver.active.get_current_stream(device)
    run(grid[0], second, 1, stream, function, metadata, None, None, None, *args, *constants)


class _Parameters(NamedTuple):
    """How many pointers come first; which arguments are specialised on by address, which by value; the constexprs."""

    num_pointers: int
    aligned: list[int]
    numbers: list[int]
    constexprs: list[str]


@cache
def _parameters(kernel: Any) -> _Parameters:
    params = [param for param in kernel.params if not param.is_constexpr]
    pointers = sum(param.name.endswith("_ptr") for param in params)
    aligned = [i for i in range(pointers) if not params[i].do_not_specialize_on_alignment]
    numbers = [i for i in range(pointers, len(params)) if not params[i].do_not_specialize]
    return _Parameters(pointers, aligned, numbers, [param.name for param in kernel.params if param.is_constexpr])


@contextmanager
def given_to(note: Callable[[Launch], object]) -> Iterator[None]:
    """Launches are given to note, and not done."""
    token = _noted.set(note)
    try:
        yield
    finally:
        _noted.reset(token)


@contextmanager
def compiled(show_progress: bool) -> Iterator[None]:
    """Launches are not done, but what they need is compiled, several kernels at a time: all of it when this ends.

    What Triton finds in its cache costs little.
    """
    begun: set[tuple[Any, ...]] = set()

    def begin(one: Launch) -> None:
        pointers, _, numbers, _ = _parameters(one.kernel)
        types = tuple(arg.dtype for arg in one.args[:pointers])
        key = (one.kernel.__name__, *one.config.values(), *types, *(one.args[i] for i in numbers))
        if key in begun:
            return
        begun.add(key)
        bar.total = len(begun)
        args = (triton.MockTensor(arg.dtype) if isinstance(arg, Tensor) else arg for arg in one.args)
        made = one.kernel.warmup(*args, grid=one.grid, **one.config)
        if (future := getattr(made, "future", None)) is not None:
            future.add_done_callback(lambda _: bar.update())
        else:
            bar.update()

    bar = tqdm(desc="Compiling kernels", disable=not show_progress)
    with bar, ThreadPoolExecutor() as threads, triton.AsyncCompileMode(threads), given_to(begin):
        yield
