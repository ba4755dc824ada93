"""Measures how a checkpoint is loaded: the time, and the most anonymous memory that the process holds meanwhile.

    python benchmarks/evidence/bench_loading.py qwen3-0.6b --quantization none int8

A shape's checkpoint is written first, with random weights, into a folder that is removed at the end. Each load is a
process of its own, with a KV cache of one sequence of 64 tokens. Memory is RssAnon of /proc/self/status, 500 times a
second; pages of the checkpoint that are mapped do not count. It is given above what the process held before it loaded.
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

import torch
from safetensors.torch import save_file

SHARD = 1 << 30


def read_anonymous() -> int:
    """Return the bytes of anonymous memory that this process has."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def write_checkpoint(shape: str, folder: Path) -> None:
    """Write random bfloat16 weights in the tensors of a checkpoint."""
    from nanovllm.backends import BACKENDS
    from nanovllm.layers.parallel import Parallel
    from nanovllm.models.config import load_model_config
    from nanovllm.models.decoder import Decoder
    from nanovllm.models.shapes import find_shape

    data = find_shape(shape, "dummy")
    if data is None:
        raise SystemExit(f"{shape} is no shape")
    (folder / "config.json").write_text(json.dumps(data))
    with torch.device("meta"):
        model = Decoder(load_model_config(data, shape), BACKENDS["torch"](), Parallel(), 16)
    torch.manual_seed(0)
    shard: dict[str, torch.Tensor] = {}
    num_files = 0
    for name, target in model.weight_targets():
        if name not in shard:
            shard[name] = torch.empty(target.shape, dtype=torch.bfloat16).normal_(0, 0.02)
        if sum(tensor.nbytes for tensor in shard.values()) > SHARD:
            save_file(shard, folder / f"model-{num_files}.safetensors")
            shard = {}
            num_files += 1
    save_file(shard, folder / f"model-{num_files}.safetensors")


def load(folder: str, options: dict[str, object]) -> None:
    """Load a checkpoint, and print seconds and bytes as JSON."""
    from nanovllm import LLM

    with LLM("tiny-qwen3", device="cpu"):  # imports and compiled kernels are not counted
        pass
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", help="a shape such as qwen3-0.6b")
    parser.add_argument("--quantization", nargs="+", default=["none", "int8"])
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        load(options.shape, json.loads(options.load))
        return
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(options.shape, Path(folder))
        size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
        print(f"{options.shape}: files of {size / 1e9:.2f} GB, {os.cpu_count()} cores")
        print(f"{'quantization':>14} {'seconds':>8} {'most, GB':>9} {'held, GB':>9}")
        for _ in range(options.repeat):
            for name in options.quantization:
                asked = {"attention_backend": options.attention_backend, "dtype": "bfloat16"}
                asked |= {} if name == "none" else {"quantization": name}
                command = [sys.executable, __file__, folder, "--load", json.dumps(asked)]
                answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                row = json.loads(answer.splitlines()[-1])
                print(f"{name:>14} {row['seconds']:8.2f} {row['most'] / 1e9:9.2f} {row['held'] / 1e9:9.2f}", flush=True)


if __name__ == "__main__":
    main()
