"""Launches Triton kernels. They are compiled once, in parallel if they are known beforehand, and launched directly."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor
from tqdm import tqdm

from nanovllm.backends.gpu.triton_shim import INTERPRETED, LAUNCHES_DIRECTLY, tl, triton
from nanovllm.utils.progress import hide_unless


class Launch(NamedTuple):
    """One launch. args are all pointers, then numbers; config is the constexprs, then options such as num_warps.

    A pointer may be None: then no code that reads it is compiled.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    config: Mapping[str, float | None]


_compiled: dict[tuple[Any, ...], tuple[Any, ...]] = {}
_receiver: ContextVar[Callable[[Launch], object] | None] = ContextVar("receiver", default=None)
"""A function that is given this thread's launches, which are then not done."""


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr):
    """Wait until all that the stream did before is done. This is the first statement of every kernel.

    With programmatic dependent launch (PDL) a kernel's programs may start while its predecessor still runs, which hides
    the cost of a start. All of them wait here, so whoever waits for this kernel has waited for all before it.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@cache
def _dependent_launches(device: int) -> dict[str, int]:
    """Return the options of a launch that make it a programmatic dependent one, which sm_90 and later can do."""
    if INTERPRETED or not LAUNCHES_DIRECTLY:  # another version may lack these options
        return {"PDL": False}
    has_it = triton.runtime.driver.active.get_current_target().arch >= 90
    return {"PDL": has_it, "launch_pdl": has_it}


def launch(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], config: Mapping[str, float | None]) -> None:
    """Do what `kernel[grid](*args, **config)` does, in less than half of the 10 microseconds that Triton takes for it.

    At each launch Triton derives anew which variant of a kernel it needs. Here a key says it: the constexprs, the
    pointers' types, and the numbers that the kernel is specialised on. Triton launches by itself where a pointer is no
    multiple of 16, which is rare, or where its version is unknown. Its launch hooks, for profilers, are not called.

    A grid without programs, such as that of a step without tokens, launches nothing.
    """
    if 0 in grid:
        return  # CUDA refuses such a grid
    device = args[0].get_device()
    config = {**config, **_dependent_launches(device)}
    receive = _receiver.get()
    if receive is not None:
        receive(Launch(kernel, grid, args, config))
        return
    if INTERPRETED or not LAUNCHES_DIRECTLY:
        kernel[grid](*args, **config)
        return
    pointers, aligned, numbers, constexprs = get_parameters(kernel)
    bits = 0  # of all addresses: a multiple of 16 if each of them is one
    for i in aligned:
        bits |= 0 if args[i] is None else args[i].data_ptr()
    if bits % 16:
        kernel[grid](*args, **config)
        return
    types = [None if pointer is None else pointer.dtype for pointer in args[:pointers]]
    key = (kernel.__name__, device, *config.values(), *types, *[args[i] for i in numbers])
    found = _compiled.get(key)
    if found is None:
        made = kernel[grid](*args, **config)
        _compiled[key] = made.run, made.function, made.packed_metadata, tuple(config[name] for name in constexprs)
        return
    run, function, metadata, constants = found
    second = grid[1] if len(grid) > 1 else 1
    stream = triton.runtime.driver.active.get_current_stream(device)
    run(grid[0], second, 1, stream, function, metadata, None, None, None, *args, *constants)  # None: no launch hooks


@cache
def get_parameters(kernel: Any) -> tuple[int, list[int], list[int], list[str]]:
    """Return the number of pointers, which arguments make a variant by address or by value, and the constexprs."""
    params = [param for param in kernel.params if not param.is_constexpr]
    pointers = sum(param.name.endswith("_ptr") for param in params)
    aligned = [i for i in range(pointers) if not params[i].do_not_specialize_on_alignment]
    numbers = [i for i in range(pointers, len(params)) if not params[i].do_not_specialize]
    return pointers, aligned, numbers, [param.name for param in kernel.params if param.is_constexpr]


@contextmanager
def redirect_launches(receive: Callable[[Launch], object]) -> Iterator[None]:
    """Give launches to a function instead of doing them, in this thread."""
    token = _receiver.set(receive)
    try:
        yield
    finally:
        _receiver.reset(token)


@contextmanager
def compile_launches(show_progress: bool) -> Iterator[None]:
    """Compile the kernels of launches, several at a time, instead of doing them. All are compiled when this ends.

    A kernel that Triton finds in its cache costs little.
    """
    begun: set[tuple[Any, ...]] = set()

    def begin(one: Launch) -> None:
        pointers, _, numbers, _ = get_parameters(one.kernel)
        types = tuple(None if arg is None else arg.dtype for arg in one.args[:pointers])
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

    bar = tqdm(desc="Compiling kernels", **hide_unless(show_progress))
    with bar, ThreadPoolExecutor() as threads, triton.AsyncCompileMode(threads), redirect_launches(begin):
        yield
