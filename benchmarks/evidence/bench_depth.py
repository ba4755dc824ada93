"""Measures prompts and decode steps at several depths of context, ours and those of other engines.

    python benchmarks/evidence/bench_depth.py --depths 512 2048 8192 --num-seqs 1 8 32
    python benchmarks/evidence/bench_depth.py --lines int8 openvino llama-cpp --openvino-python DIR/bin/python \
        --llama-cpp-python DIR2/bin/python

A line is an engine with its keys and values: ours in the model's type ("auto") or in "int8", or a line of bench.py
--compare. Lines take turns, each in a process of its own, and each round begins with another one. A case is NUM_SEQS
sequences of DEPTH tokens. "prompts" is the median of the seconds until every sequence has its first token. "step" is
the median of the milliseconds of the decode steps that follow, in which every sequence gets a token. "floor" is the
share of that time in which this machine could have read the step's bytes; they are given for the lines whose format of
keys and values we know. llama.cpp computes one prompt and copies its keys and values: its batches have no seconds for
prompts. The last line is one JSON document.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.bench_compare import RIVALS, run_engine
from benchmarks.bench_workload import write_checkpoint
from benchmarks.measuring import commit
from benchmarks.rivals.worker import DepthTimes, Engine
from benchmarks.rivals.worker import main as work
from nanovllm.apps.floor import Model, measure_machine, step_cost
from nanovllm.features.shapes import PRESETS, preset_config
from nanovllm.models.model_config import load_model_config

OURS = ("auto", "int8")
MODES = {line: (name, mode) for name, rival in RIVALS.items() for line, mode in rival.modes.items()}
NUM_DECODES = 24
"""Decode steps of a case. The first two are left out: they may record a step."""
Case = dict[str, Any]


def load(spec: dict[str, Any], kind: str) -> Engine:
    """Make our engine with keys and values of a kind, as a worker of benchmarks/rivals does."""
    from nanovllm import LLM, SamplingParams

    depth = spec["depth"]["tokens"]
    llm = LLM(
        spec["model"],
        dtype=spec["dtype"],
        kv_cache_dtype=kind,
        enable_prefix_caching=False,
        max_num_seqs=spec["max_num_seqs"],
        max_model_len=depth + NUM_DECODES + 2,
        num_kvcache_blocks=spec["max_num_seqs"] * ((depth + NUM_DECODES) // 64 + 2),
    )
    params = SamplingParams(temperature=0, max_tokens=NUM_DECODES, ignore_eos=True)

    def measure(prompts: list[list[int]]) -> DepthTimes:
        for prompt in prompts:
            llm.add_request(prompt, params)
        steps = []
        seconds = 0.0
        while not llm.is_finished():
            since = time.perf_counter()
            _, num_tokens = llm.step()
            if num_tokens < 0:
                steps.append(time.perf_counter() - since)
            else:
                seconds += time.perf_counter() - since
        return {"prompt_seconds": seconds, "step_seconds": steps}

    def run(workload: dict[str, Any]) -> int:
        llm.generate(workload["prompts"], params, use_tqdm=False)
        return NUM_DECODES

    return Engine(run, f"KV {kind}", lambda counts: [measure(spec["workload"]["prompts"][:n]) for n in counts])


def make_specification(
    args: argparse.Namespace, folder: Path, exports: Path, depth: int, token_bytes: int
) -> dict[str, Any]:
    """Return the document that the workers of one depth read.

    Args:
        token_bytes: of the keys and values of a token, in the model's type.
    """
    counts = [n for n in args.num_seqs if n * depth <= args.max_tokens]
    prompts = [[10 + (7 * i + 13 * j) % 900 for j in range(depth)] for i in range(max(counts))]
    workload = {"prompts": prompts, "output_lens": [NUM_DECODES] * len(prompts)}
    return {
        "model": str(folder),
        "exports": str(exports),
        "dtype": args.dtype,
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "temperature": 0,
        "max_num_seqs": max(counts),
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "workload": workload,
        "cache_gb": 1 + sum(len(prompt) + 4 * NUM_DECODES for prompt in prompts) * token_bytes // 1_000_000_000,
        "warm_up": {"prompts": [[5] * 64], "output_lens": [NUM_DECODES]},
        "depth": {"tokens": depth, "num_seqs": counts, "num_decodes": NUM_DECODES},
    }


def make_command(args: argparse.Namespace, line: str, spec: Path) -> list[str]:
    if line in OURS:
        return [sys.executable, __file__, str(spec), line]
    name, mode = MODES[line]
    python = getattr(args, f"{name.replace('-', '_')}_python")
    return [python, "-m", f"benchmarks.rivals.{name.replace('-', '_')}", str(spec), mode]


def measure_depth(args: argparse.Namespace, spec: dict[str, Any]) -> dict[str, list[list[DepthTimes]]]:
    """Run each line args.rounds times. Return for each line, round and number of sequences what was measured."""
    found: dict[str, list[list[DepthTimes]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "spec.json"
        path.write_text(json.dumps(spec))
        for number in range(args.rounds):
            for line in args.lines[:: 1 - number % 2 * 2]:
                log = Path(spec["exports"]) / f"{line.replace(' ', '-')}.log"
                result = run_engine(make_command(args, line, path), log, args.run_seconds)
                if "cannot_run" in result:
                    print(f"left out   {line}: {result['cannot_run']}", flush=True)
                else:
                    found.setdefault(line, []).append(result["depths"])
    return found


def make_case(line: str, model: Model, num_seqs: int, depth: int, rounds: list[DepthTimes], read_rate: float) -> Case:
    """Return one line of the table."""
    prompts = [times["prompt_seconds"] for times in rounds if times["prompt_seconds"] is not None]
    step = statistics.median(seconds for times in rounds for seconds in times["step_seconds"][2:])
    kv_bytes = model.kv_bytes_per_token
    if line == "int8":
        kv_bytes = model.sizes.kv_bytes(torch.int8)
    elif line.endswith("KV Q8_0"):
        kv_bytes = kv_bytes * 34 // 64  # 32 values in one byte each, and a scale of two bytes
    num_bytes = None
    if not line.endswith("defaults"):
        num_bytes = model.weight_bytes + num_seqs * depth * kv_bytes
    return {
        "line": line,
        "num_seqs": num_seqs,
        "depth": depth,
        "prompts": statistics.median(prompts) if prompts else None,
        "step": step,
        "tokens_per_second": num_seqs / step,
        "bytes": num_bytes,
        "floor": None if num_bytes is None else num_bytes / read_rate / step,
    }


def show(case: Case) -> str:
    prompts = "" if case["prompts"] is None else f"{case['prompts']:.3f}"
    read = "" if case["bytes"] is None else f"{case['bytes'] / 1e9:.2f} {case['floor']:7.0%}"
    name = f"{case['num_seqs']} x {case['depth']:,}"
    return (
        f"{name:>12} {case['line']:24} {prompts:>10} {case['step'] * 1e3:9.2f} {case['tokens_per_second']:9.1f} {read}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=PRESETS, default="qwen3-0.6b", help="a shape, with random weights")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--depths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--max-tokens", type=int, default=70_000, help="leave out cases of more tokens than this")
    parser.add_argument("--max-num-batched-tokens", type=int, help="of OpenVINO; default: its own")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--run-seconds", type=float, help="leave out a run that takes longer than this")
    parser.add_argument("--lines", nargs="+", choices=[*OURS, *MODES], default=list(OURS), metavar="LINE")
    for name, rival in RIVALS.items():
        parser.add_argument(f"--{name}-python", default=sys.executable, metavar="PYTHON", help=rival.script)
    args = parser.parse_args()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanovllm" / "bench"
    dtype = getattr(torch, args.dtype)
    folder = cache / f"{args.model}-{args.dtype}"
    shape = preset_config(args.model)
    write_checkpoint(shape, dtype, folder)
    model = Model(load_model_config(shape, args.model), dtype)
    cases = []
    print(f"{'case':>12} {'line':24} {'prompts, s':>10} {'step, ms':>9} {'tok/s':>9} GB, floor", flush=True)
    for depth in args.depths:
        spec = make_specification(args, folder, cache / "exports", depth, model.kv_bytes_per_token)
        machine = measure_machine(torch.device("cpu"), dtype)
        rates = f"reads {machine.read_rate / 1e9:.1f} GB/s and multiplies {machine.matmul_rate / 1e12:.3f} TFLOP/s"
        print(f"this machine {rates}", flush=True)
        found = measure_depth(args, spec)
        for i, num_seqs in enumerate(spec["depth"]["num_seqs"]):
            for line, rounds in found.items():
                case = make_case(line, model, num_seqs, depth, [times[i] for times in rounds], machine.read_rate)
                cases.append(case)
                print(show(case), flush=True)
            floor = step_cost(model, machine, [(0, depth)] * num_seqs, num_seqs).seconds
            print(f"the floor of these prompts is {floor:.2f} s", flush=True)
    print(json.dumps({"commit": commit(), "arguments": vars(args), "cases": cases}))


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[2] in OURS:
        work(load, {})
    else:
        main()
