"""Where the seconds go from a model's folder to the first token: each start a process of its own, cold and warm.

    python benchmarks/evidence/bench_start.py                            Qwen3-0.6B's shape, random weights on disk
    python benchmarks/evidence/bench_start.py --tokenizer FOLDER         the same, with that folder's tokenizer
    python benchmarks/evidence/bench_start.py --model tiny-qwen3 --rounds 9

Cold: the system has forgotten the model's files (not Python's and torch's); with --compile also the compiled kernels
are missing. Medians of all rounds, cold and warm in turn. What runs beside the weights is marked with a +, and not
part of the sum. The last line is one JSON document.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

STEPS = (
    # what, and which function of which module takes that long; one that is named twice counts once
    ("transformers: import, configuration", "nanovllm.load", "load_model_config"),
    ("kernels: loaded, or compiled", "nanovllm.backends.cpu.library", "_load"),
    ("+ transformers: import, tokenizer", "nanovllm.load", "Tokenizer.find"),
    ("an empty model", "nanovllm.models.decoder", "Decoder.__init__"),
    ("an empty model", "nanovllm.runner.model_runner", "allocate"),
    ("weights read", "nanovllm.load", "load_weights"),
    ("weights packed", "nanovllm.backends.cpu.backend", "CpuBackend.pack_weights"),
    ("pages of the KV cache touched", "nanovllm.runner.model_runner", "ModelRunner.make_caches"),
)


def watch(seconds: dict[str, float], what: str, module: str, name: str) -> None:
    """Add what a function takes to seconds[what]."""
    *path, last = name.split(".")
    owner: Any = sys.modules[module]
    for part in path:
        owner = getattr(owner, part)
    function = getattr(owner, last)

    def timed(*arguments: Any, **options: Any) -> Any:
        since = time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            seconds[what] = seconds.get(what, 0.0) + time.perf_counter() - since

    setattr(owner, last, staticmethod(timed) if isinstance(owner.__dict__.get(last), staticmethod) else timed)


def start(args: argparse.Namespace, begun: float) -> None:
    """In a process of its own: print the seconds of each part, since the other process began to start this one."""
    laps: dict[str, float] = {}

    def lap(what: str) -> None:
        laps[what] = time.perf_counter() - begun - sum(laps.values())

    lap("Python")
    for module in ("nanovllm", "torch"):  # in this order: the package bounds how long torch's threads spin
        __import__(module)
    lap("import torch")
    from nanovllm import LLM, SamplingParams
    from nanovllm.backends.cpu import backend as cpu_backend  # noqa: F401

    lap("import the engine")
    seconds: dict[str, float] = {}
    for step in STEPS:
        watch(seconds, *step)
    llm = LLM(args.model, dtype=args.dtype, **dict(option.split("=", 1) for option in args.set))
    lap("loading")
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    lap("the first token")
    loading = laps.pop("loading")
    first = laps.pop("the first token")
    found = {what: seconds.get(what, 0.0) for what, *_ in STEPS}
    rest = loading - sum(value for what, value in found.items() if not what.startswith("+"))
    total = sum(laps.values()) + loading + first
    print(json.dumps({**laps, **found, "the rest of loading": rest, "the first token": first, "in all": total}))
    os._exit(0)  # what ending takes is no part of a start


def forget(folder: Path) -> None:
    """Let the system drop what it holds of the folder's files."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def find_folder(args: argparse.Namespace) -> Path:
    """The model's; a shape's is written, if need be, into the user's cache."""
    import torch

    from benchmarks.bench_workload import write_checkpoint
    from nanovllm.backends.cpu.library import cache_folder
    from nanovllm.features.shapes import PRESETS, preset_config
    from nanovllm.models.hub import PATTERNS, find_model

    if args.model not in PRESETS:
        return find_model(args.model)
    of = Path(args.tokenizer).resolve() if args.tokenizer else None
    folder = cache_folder() / "bench" / f"{args.model}-{args.dtype}{f'-{of.name}' if of is not None else ''}"
    write_checkpoint(preset_config(args.model), getattr(torch, args.dtype), folder)
    for pattern in (p for p in PATTERNS if of is not None and "safetensors" not in p and "config.json" not in p):
        for path in of.glob(pattern):  # type: ignore[union-attr]
            shutil.copy(path, folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add: Callable[..., Any] = parser.add_argument
    add("--model", default="qwen3-0.6b", help="a folder, or a shape, of which random weights are written")
    add("--dtype", default="bfloat16")
    add("--tokenizer", metavar="FOLDER", help="for a shape: whose tokenizer lies beside its weights")
    add("--rounds", type=int, default=5)
    add("--set", nargs="+", default=[], metavar="NAME=VALUE", help="options of LLM that are strings")
    add("--compile", action="store_true", help="cold starts find no compiled kernels")
    add("--child", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        return start(args, args.child)
    folder = find_folder(args)
    own = ["--model", str(folder), "--dtype", args.dtype, *(["--set", *args.set] if args.set else [])]
    runs: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for turn in range(args.rounds + 1):
        for kind, found in runs.items():
            with tempfile.TemporaryDirectory() as empty:
                environment = {**os.environ, **({"XDG_CACHE_HOME": empty} if kind == "cold" and args.compile else {})}
                if kind == "cold":
                    forget(folder)
                command = [sys.executable, __file__, *own, "--child", str(time.perf_counter())]
                done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            if turn:  # the first round warms up
                found.append(json.loads(done.stdout.splitlines()[-1]))
    medians = {
        kind: {what: statistics.median(run[what] for run in found) for what in found[0]} for kind, found in runs.items()
    }
    print(f"{'seconds':36s} {'cold':>7s} {'warm':>7s}")
    for what in medians["warm"]:
        print(f"{what:36s} {medians['cold'][what]:7.2f} {medians['warm'][what]:7.2f}")
    print(json.dumps({"benchmark": "start", "arguments": vars(args), "medians": medians, "runs": runs}))
    return None


if __name__ == "__main__":
    main()
