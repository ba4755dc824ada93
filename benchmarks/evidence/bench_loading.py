"""Measures how a checkpoint is loaded: the time, and the most anonymous memory that the process holds meanwhile.

    python benchmarks/evidence/bench_loading.py qwen3-0.6b --formats bfloat16 int8 awq w8a16

A shape's checkpoints are written first, with random weights, into a folder that is removed at the end. "int8" is the
checkpoint in bfloat16 with quantization="int8", and so is "int8-dynamic"; the other formats are the checkpoint's own.
Each load is a process of its own, with a KV cache of one sequence of 64 tokens. Memory is RssAnon of /proc/self/status,
500 times a second; pages of the checkpoint that are mapped do not count. It is given above what the process held before
it loaded.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.random_checkpoint import CONFIGS, write_random_checkpoint
from nanovllm.features.shapes import PRESETS, preset_config

AT_LOAD = ("int8", "int8-dynamic")
"""Formats that are made while a bfloat16 checkpoint is read."""


def read_anonymous() -> int:
    """Return the bytes of anonymous memory that this process has."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def load(folder: str, options: dict[str, object]) -> None:
    """Load a checkpoint, and print seconds and bytes as JSON."""
    from nanovllm import LLM
    from nanovllm.apps.estimate import fetch_config

    with LLM("tiny-qwen3", device="cpu"):  # imports and compiled kernels are not counted
        pass
    fetch_config(folder)  # imports what transformers and GGUF need for the model's family
    before = read_anonymous()
    most = [0]
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.002):
            most[0] = max(most[0], read_anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    with LLM(folder, max_model_len=64, num_kvcache_blocks=1, device="cpu", **options):
        seconds = time.perf_counter() - start
        is_over.set()
        watcher.join()
        held = read_anonymous() - before
        print(json.dumps({"seconds": seconds, "most": most[0] - before, "held": held}))


def measure(folder: Path, backend: str, format_name: str) -> dict[str, float]:
    """Load a checkpoint in a process of its own. Return its seconds, and the bytes that it held at most and held."""
    asked = {"attention_backend": backend, "dtype": "bfloat16"}
    if format_name in AT_LOAD:
        asked["quantization"] = format_name
    command = [sys.executable, __file__, str(folder), "--load", json.dumps(asked)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    row: dict[str, float] = json.loads(answer.splitlines()[-1])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", help="a shape such as qwen3-0.6b")
    parser.add_argument("--formats", nargs="+", choices=[*AT_LOAD, *CONFIGS], default=["bfloat16", "int8"])
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        load(options.shape, json.loads(options.load))
        return
    if options.shape not in PRESETS:
        parser.error(f"{options.shape} is no shape; shapes are {', '.join(PRESETS)}")
    with tempfile.TemporaryDirectory() as parent:
        print(f"{options.shape}, {os.cpu_count()} cores")
        print(f"{'format':>14} {'files, GB':>9} {'seconds':>8} {'most, GB':>9} {'held, GB':>9}")
        folders = {}
        for name in options.formats:
            stored = "bfloat16" if name in AT_LOAD else name
            folders[name] = Path(parent) / stored
            if not folders[name].exists():
                write_random_checkpoint(preset_config(options.shape), stored, folders[name])
        for _ in range(options.repeat):
            for name, folder in folders.items():
                size = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e9
                row = measure(folder, options.attention_backend, name)
                figures = f"{row['seconds']:8.2f} {row['most'] / 1e9:9.2f} {row['held'] / 1e9:9.2f}"
                print(f"{name:>14} {size:9.2f} {figures}", flush=True)


if __name__ == "__main__":
    main()
