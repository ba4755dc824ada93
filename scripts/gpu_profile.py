"""Shows where ten decode steps spend the device's time: kernels by name, and the gaps between them.

    python scripts/gpu_profile.py [--num-seqs 256] [--context 1024] [--no-pdl]
    python scripts/gpu_profile.py --eager      products by shape

A step that a CUDA graph replays has no operators, so its kernels have no shapes. Without graphs the same kernels run,
and torch's profiler notes which operator launched each of them.
Random weights of Qwen3-0.6B's shape; top_k 20 and top_p 0.95, as Qwen3's generation_config.json asks.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerActivity, profile

from nanovllm import LLM, SamplingParams
from nanovllm.backends.gpu import launch

STEPS = 10
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_mm")


def describe_products(averages: EventList, steps: int) -> list[str]:
    """Return one line for each shape of product, the longest first: its time and number in a step, and its operands.

    Args:
        averages: of a profile with record_shapes=True, grouped by shapes.
    """
    products = [event for event in averages if event.key in PRODUCTS]
    products.sort(key=lambda event: event.self_device_time_total, reverse=True)
    lines = [f"{'us a step':>10} {'number':>7} {'us each':>8}  product"]
    for event in products:
        total = event.self_device_time_total / steps
        operands = " x ".join(str(shape) for shape in event.input_shapes if len(shape) > 1)
        each = event.self_device_time_total / event.count
        name = event.key.removeprefix("aten::")
        lines.append(f"{total:10.1f} {event.count / steps:7.1f} {each:8.2f}  {name} {operands}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--no-pdl", action="store_true", help="without programmatic dependent launch")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs; lists products by shape")
    args = parser.parse_args()
    if args.no_pdl:
        launch._dependent_launches = lambda device: {"PDL": False}  # type: ignore[assignment]
    if not torch.cuda.is_available():
        sys.exit("gpu_profile.py measures a GPU, and there is no CUDA device here (torch.cuda.is_available())")
    max_model_len = args.context + 256
    options = {"max_num_seqs": args.num_seqs, "max_model_len": max_model_len, "enforce_eager": args.eager}
    activities = [ProfilerActivity.CUDA, ProfilerActivity.CPU] if args.eager else [ProfilerActivity.CUDA]
    with LLM("qwen3-0.6b", load_format="dummy", **options) as llm:
        params = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, max_tokens=200, ignore_eos=True)
        for i in range(args.num_seqs):
            llm.engine.add(llm.prepare([(7 * i + j) % 1000 for j in range(args.context)], params))
        while llm.stats()["num_generated_tokens"] < 20 * args.num_seqs:  # the prompts, and some decodes
            llm.engine.step()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(STEPS):
            llm.engine.step()
        torch.cuda.synchronize()
        per_step = (time.perf_counter() - start) / STEPS
        with profile(activities=activities, record_shapes=args.eager) as profiled:
            for _ in range(STEPS):
                llm.engine.step()
            torch.cuda.synchronize()
        llm.engine.abort_all()
    if args.eager:
        print("\n".join(describe_products(profiled.key_averages(group_by_input_shape=True), STEPS)))
    averages = profiled.key_averages()
    busy = sum(event.self_device_time_total for event in averages) / STEPS
    nodes = sum(event.count for event in averages) / STEPS
    print(averages.table(sort_by="self_device_time_total", row_limit=25, max_name_column_width=60))
    print(f"{1e6 * per_step:.0f} us a step without the profiler; kernels {busy:.0f} us, {nodes:.0f} of them a step")
    if not args.no_pdl:
        print("A kernel's time has its waiting for the one before in it: only --no-pdl says what each kernel costs.")


if __name__ == "__main__":
    main()
