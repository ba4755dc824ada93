"""Measures how output tokens a second grow with threads and with sequences at a time, finds the limit, draws a picture.

    python benchmarks/evidence/bench_batches.py -o docs/batches.svg
    python benchmarks/evidence/bench_batches.py --threads 1 8 16 --batches 1 16 128 --dtype float32

Each number of threads runs in its own process. A rate is the number of sequences over the median time of the last
steps, in which all of them decode. The percentage compares this time with the floor: the time that the step's bytes and
FLOPs need (apps/floor.py) at the rates of the same threads, which the same process measures with the package's
product.
"bytes" or "arithmetic" names the larger part of the floor. The last line is one JSON document.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

INPUT_LEN = 16
OUTPUT_LEN = 12
LAST_STEPS = 8
COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")

Row = dict[str, Any]


def measure(args: argparse.Namespace) -> None:
    """Measure all batches and print them as JSON. main() starts one process of this for each number of threads."""
    import nanovllm  # isort: skip
    import torch

    from benchmarks.bench_processors import read_rate
    from nanovllm.apps.estimate import fetch_config
    from nanovllm.apps.floor import Machine, Model, step_cost
    from nanovllm.backends.cpu.library import cpu_library
    from nanovllm.features.shapes import PRESETS

    dtype = getattr(torch, args.dtype)
    library = cpu_library()
    packed = library.pack(torch.ones(6144, 1024, dtype=dtype))
    x = torch.ones(512, 1024, dtype=dtype)
    y = torch.empty(512, 6144, dtype=dtype)
    seconds = math.inf
    for _ in range(7):
        since = time.perf_counter()
        library.call("linear", dtype, x, packed, None, y, 512, 1024, 6144)
        seconds = min(seconds, time.perf_counter() - since)
    reads = read_rate()
    computes = 2 * 512 * 1024 * 6144 / seconds
    model = Model(fetch_config(args.model), dtype)
    load_format = "dummy" if args.model in PRESETS else "auto"
    options = {"dtype": args.dtype, "attention_backend": "cpu", "max_model_len": 64, "kvcache_memory_bytes": 2 << 30}
    params = nanovllm.SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True)
    rows = []
    with nanovllm.LLM(args.model, load_format=load_format, max_num_seqs=max(args.batches), **options) as llm:
        for batch in args.batches:
            for i in range(batch):
                llm.add_request([1 + i] * INPUT_LEN, params)
            times = []
            while not llm.is_finished():
                since = time.perf_counter()
                llm.step()
                times.append(time.perf_counter() - since)
            step = statistics.median(times[-LAST_STEPS:])
            work = [(INPUT_LEN + OUTPUT_LEN - LAST_STEPS // 2, 1)] * batch
            of_bytes, of_flops, floor = (
                step_cost(model, Machine(*rates), work, batch).seconds
                for rates in ((reads, reads, math.inf), (math.inf, math.inf, computes), (reads, reads, computes))
            )
            row = {"batch": batch, "rate": batch / step, "step_ms": 1000 * step, "percent": 100 * floor / step}
            rows.append(row | {"stopped_by": "bytes" if of_bytes > of_flops else "arithmetic"})
    print(json.dumps({"GB/s": reads / 1e9, "TFLOP/s": computes / 1e12, "rows": rows}))


def draw(found: dict[int, dict[str, Any]], title: str) -> str:
    """Return an SVG: tokens a second by sequences, one line for each number of threads. Hollow: limited by bytes."""
    left = 60
    top = 40
    width = 520
    height = 300
    batches = sorted({row["batch"] for of in found.values() for row in of["rows"]})
    most = max(row["rate"] for of in found.values() for row in of["rows"])
    unit = 10 ** math.floor(math.log10(most)) / 2
    most = math.ceil(most / unit) * unit
    span = math.log2(batches[-1] / batches[0]) or 1.0

    def place(row: Row) -> tuple[float, float]:
        return left + width * math.log2(row["batch"] / batches[0]) / span, top + height * (1 - row["rate"] / most)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 40} {top + height + 50}" '
        f'width="{left + width + 40}" height="{top + height + 50}" font-family="sans-serif" font-size="12" '
        f'fill="#6e7781"><text x="{left}" y="18">{title}</text>'
    ]
    for i in range(round(most / unit) + 1):
        y = top + height * (1 - i * unit / most)
        parts.append(f'<line x1="{left}" x2="{left + width}" y1="{y}" y2="{y}" stroke="#6e7781" stroke-opacity=".25"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{i * unit:g}</text>')
    for batch in batches:
        x, _ = place({"batch": batch, "rate": 0})
        parts.append(f'<text x="{x}" y="{top + height + 20}" text-anchor="middle">{batch}</text>')
    parts.append(f'<text x="{left}" y="{top + height + 40}">sequences at a time; output tokens a second</text>')
    for (threads, of), color in zip(found.items(), COLORS, strict=False):
        points = [place(row) for row in of["rows"]]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        for (x, y), row in zip(points, of["rows"], strict=True):
            fill = "white" if row["stopped_by"] == "bytes" else color
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" stroke="{color}" stroke-width="2"/>')
        x, y = points[-1]
        parts.append(f'<text x="{x - 6}" y="{y - 10:.1f}" text-anchor="end" fill="{color}">{threads} threads</text>')
    return "\n".join((*parts, "</svg>\n")).replace(">1 threads", ">1 thread")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="qwen3-0.6b", help="a folder, or a shape with random weights")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    add("--threads", type=int, nargs="+", default=[1, 2])
    add("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128], help="sequences at a time")
    add("-o", "--output", type=Path, metavar="FILE", help="the picture to write, SVG")
    add("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return measure(args)
    own = ["--model", args.model, "--dtype", args.dtype, "--batches", *map(str, args.batches)]
    found: dict[int, dict[str, Any]] = {}
    for threads in args.threads:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, __file__, "--child", *own]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        of = found[threads] = json.loads(done.stdout.splitlines()[-1])
        print(f"{threads} threads: reads {of['GB/s']:.1f} GB/s, computes {of['TFLOP/s']:.3f} TFLOP/s")
        for row in of["rows"]:
            print(
                f"  {row['batch']:4d} sequences {row['rate']:8.1f} tok/s, a step of {row['step_ms']:7.1f} ms is "
                f"{row['percent']:3.0f} % floor, of {row['stopped_by']}",
                flush=True,
            )
    if args.output is not None:
        args.output.write_text(draw(found, f"{args.model}, {args.dtype}"))
    print(json.dumps({"benchmark": "batches", "model": args.model, "dtype": args.dtype, "found": found}))
    return None


if __name__ == "__main__":
    main()
