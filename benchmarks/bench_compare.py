"""The same workload, checkpoint, dtype and threads through several engines, in turn, each run in a process of its own.

A B A B rather than A A B B: a machine that drifts then drifts for everybody.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_cost import Machine
from benchmarks.bench_workload import Workload, write_checkpoint
from nanovllm.models.hub import find_model

ENGINES = ("vllm", "transformers")
ROOT = Path(__file__).resolve().parent.parent


def compare(
    args: argparse.Namespace, shape: dict[str, Any] | None, workload: Workload, dtype: torch.dtype, machine: Machine
) -> dict[str, Any]:
    """Run every engine args.repeat times; print and return medians and ratios.

    Args:
        shape: config.json's content if random weights of that shape are wanted; None for the checkpoint args.model.
    """
    if shape is None:
        folder = find_model(args.model)
    else:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanovllm" / "bench"
        folder = cache / f"{args.model.lower()}-{str(dtype).removeprefix('torch.')}"
        write_checkpoint(shape, dtype, folder)
    commands = _commands(args, folder, dtype, machine)
    environment = _environment()
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as scratch:
        spec = Path(scratch) / "spec.json"
        spec.write_text(json.dumps(_specification(args, folder, workload, dtype)))
        for turn in range(args.repeat):
            for name, command in commands.items():
                result = _run([str(spec) if part == "SPEC" else part for part in command], environment)
                if result["num_output_tokens"] != sum(workload.output_lens):
                    raise RuntimeError(
                        f"{name} made {result['num_output_tokens']} of {sum(workload.output_lens)} tokens"
                    )
                runs[name].append(result)
                rate = result["num_output_tokens"] / result["seconds"]
                print(
                    f"run {turn + 1}      {name:24s} {result['seconds']:8.3f} s {rate:10,.1f} output tok/s", flush=True
                )
    return _report(runs)


def _commands(args: argparse.Namespace, folder: Path, dtype: torch.dtype, machine: Machine) -> dict[str, list[str]]:
    """What runs each engine; SPEC stands for the specification's path."""
    ours = [sys.executable, str(ROOT / "bench.py"), *_own_arguments(args), "--model", str(folder)]
    ours += ["--dtype", str(dtype).removeprefix("torch."), "--machine-rates"]
    ours += [str(rate) for rate in (machine.copy_rate, machine.read_rate, machine.matmul_rate)]
    commands = {"nanovllm": ours}
    if "vllm" in args.compare:
        commands["vllm"] = [args.vllm_python, str(ROOT / "benchmarks" / "bench_vllm.py"), "SPEC"]
    if "transformers" in args.compare:
        import transformers

        worker = [sys.executable, str(ROOT / "benchmarks" / "bench_transformers.py"), "SPEC"]
        commands["transformers static"] = [*worker, "static"]
        if hasattr(transformers, "ContinuousBatchingConfig"):
            commands["transformers continuous"] = [*worker, "continuous"]
    return commands


def _own_arguments(args: argparse.Namespace) -> list[str]:
    """The arguments that make bench.py run the same workload on the same engine options."""
    names = ("num_seqs", "input_len", "output_len", "shared_prefix", "temperature", "seed", "device", "max_model_len")
    names += ("tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens", "attention_backend")
    arguments = []
    for name in names:
        value = getattr(args, name)
        if value is not None:
            arguments += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, list) else [value])]
    for option in args.set:
        arguments += ["--set", option]
    return arguments


def _specification(args: argparse.Namespace, folder: Path, workload: Workload, dtype: torch.dtype) -> dict[str, Any]:
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    return {
        "model": str(folder),
        "dtype": str(dtype).removeprefix("torch."),
        "temperature": args.temperature,
        "max_model_len": args.max_model_len or max(4096, workload.max_len),
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "tensor_parallel_size": args.tensor_parallel_size,
        "static_batch": args.static_batch,
        "workload": vars(workload),
        "warm_up": vars(workload.warm_up(vocab_size)),
    }


def _environment() -> dict[str, str]:
    """The same threads for everybody. vLLM for CPUs keeps cores for itself unless it is told which to use."""
    threads = torch.get_num_threads()
    cpus = sorted(os.sched_getaffinity(0))[:threads]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _run(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """The JSON document in the command's last line (bench.py's own has its result inside)."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-4000:]}")
    document = json.loads(lines[-1])
    result: dict[str, Any] = document.get("result", document)
    result.setdefault("versions", document.get("versions"))
    return result


def _report(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    rates = {name: [r["num_output_tokens"] / r["seconds"] for r in results] for name, results in runs.items()}
    medians = {name: statistics.median(values) for name, values in rates.items()}
    titles = ("output tok/s", "lowest", "highest", "ours / its", "load + warm-up s")
    print("\n{:26s} {:>12s} {:>8s} {:>8s} {:>10s} {:>17s}".format("engine", *titles))
    for name, values in rates.items():
        before = statistics.median(r["load_seconds"] + r["warm_up_seconds"] for r in runs[name])
        ratio = medians["nanovllm"] / medians[name]
        label = f"{name} {runs[name][0]['versions'].get(name.split()[0], '')}"
        print(
            f"{label:26s} {medians[name]:12,.1f} {min(values):8,.1f} {max(values):8,.1f} {ratio:10.2f} {before:17.1f}"
        )
    ratios = {name: medians["nanovllm"] / median for name, median in medians.items()}
    return {"medians": medians, "ratios": ratios, "runs": runs}
