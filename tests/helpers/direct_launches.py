"""Compares launches by `launch` with Triton's own, on a driver that launches nothing; prints one JSON object.

A program of its own, because Triton's compiler and its interpreter cannot share a process.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import triton

from helpers.pretend_cuda import DEVICE, PretendDriver, noted, pretend_runner, unscored_plan
from nanovllm.kernels.launch import Launch, compiled, launch
from nanovllm.kernels.rms_norm import add_rms_norm
from nanovllm.runner.startup import compile_kernels, make_graphs

NUM_LAUNCHES = 196
HOOKS = (6, 7, 8)
"""Among the arguments of a launch: what profilers hang on it. A direct launch has none."""


def best_us(work: Callable[[], None]) -> float:
    """Microseconds of the fastest of twenty."""
    times = []
    for _ in range(20):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1e6 * min(times)


def count_calls(work: Callable[[], None]) -> int:
    """Count the functions, those in C included, that a piece of work calls. A busy machine changes no count."""
    calls = 0

    def note(_: FrameType, event: str, __: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def as_triton_does(one: Launch) -> None:
    one.kernel[one.grid](*one.args, **one.config)


def _value(x: object) -> object:
    return x.data_ptr() if isinstance(x, torch.Tensor) else x


def same_launches(driver: PretendDriver, launches: list[Launch]) -> bool:
    """Whether both ways give the driver the same grids, kernels and arguments."""
    given = []
    for how in (lambda one: launch(*one), as_triton_does):
        driver.launches.clear()
        for one in launches:
            how(one)
        given.append([[_value(x) for i, x in enumerate(args) if i not in HOOKS] for args in driver.launches])
    return len(given[0]) == len(launches) and given[0] == given[1]


def compile_ahead() -> tuple[int, int]:
    """How many kernels a runner compiles as it starts, and how many a decode and a mixed step then find missing."""

    def num_compiled() -> int:
        return sum(len(kernel.device_caches[0][0]) for kernel in kernels)

    with pretend_runner(max_model_len=4096, max_num_seqs=300) as runner:
        plan = unscored_plan([1, 1, 1, 100, 197])
        with noted() as launches:
            runner.sample_decoded(*runner.decode(make_graphs(runner).inputs(48)))
            runner.sample_decoded(*runner.decode(make_graphs(runner).inputs(300)))
            runner.compute(plan, torch.zeros(plan.head_size, dtype=torch.int32, device=DEVICE))
        kernels = {one.kernel.__name__: one.kernel for one in launches}.values()
        before = num_compiled()
        compile_kernels(runner)
        ahead = num_compiled()
        with compiled(show_progress=False):
            for one in launches:
                launch(*one)
        return ahead - before, num_compiled() - ahead


def main() -> None:
    driver = PretendDriver()
    triton.runtime.driver.set_active(driver)
    x = torch.zeros(9, 1024, dtype=torch.bfloat16)
    weight = torch.zeros(1024, dtype=torch.bfloat16)
    with noted() as launches:
        add_rms_norm(x, x, weight, 1e-6)
    launch(*launches[0])  # compiles
    odd = torch.zeros(9 * 1024 + 1, dtype=torch.bfloat16)[1:].view(9, 1024)
    with noted() as unaligned:
        add_rms_norm(odd, odd, weight, 1e-6)
    found = {"equal": same_launches(driver, launches), "unaligned_equal": same_launches(driver, unaligned)}
    found["direct_us"] = best_us(lambda: [launch(*one) for one in launches * NUM_LAUNCHES]) / NUM_LAUNCHES
    found["triton_us"] = best_us(lambda: [as_triton_does(one) for one in launches * NUM_LAUNCHES]) / NUM_LAUNCHES
    found["direct_calls"] = count_calls(lambda: launch(*launches[0]))
    found["triton_calls"] = count_calls(lambda: as_triton_does(launches[0]))
    found["compiled_ahead"], found["compiled_by_steps"] = compile_ahead()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
