"""The same workload, model, dtype and threads through several engines, in turn, each run in a process of its own.

Engines take turns (A B A B), so that a machine that drifts drifts for all of them. All read the same GGUF file, if the
model is one. A new rival is an entry of RIVALS and a file in benchmarks/rivals. benchmarks/rivals/worker.py documents
what passes between here and there.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_workload import write_checkpoint
from nanovllm.apps.bench import Workload
from nanovllm.apps.estimate import open_model
from nanovllm.apps.floor import Machine
from nanovllm.config import EngineConfig
from nanovllm.models.hub import PATTERNS
from nanovllm.models.model_folder import ModelFolder

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Rival:
    """An engine to measure beside ours.

    Attributes:
        package: its interpreter must be able to import this. nano-vLLM's own package has our name, so there it is
            another that nano-vLLM needs.
        script: makes an environment with that package. "" if our own interpreter will do.
        modes: the table's lines, each with the mode that its worker gets as second argument.
    """

    package: str
    script: str
    modes: dict[str, str]


RIVALS = {
    "nano-vllm": Rival("flash_attn", "scripts/rival_env.sh nano-vllm", {"nano-vllm": ""}),
    "vllm": Rival("vllm", "scripts/rival_env.sh vllm", {"vllm": ""}),
    "transformers": Rival(
        "transformers", "", {"transformers static": "static", "transformers continuous": "continuous"}
    ),
    "openvino": Rival(
        "openvino_genai",
        "scripts/rival_env.sh openvino",
        {
            "openvino": "",
            "openvino defaults": "defaults",
            "openvino int8": "int8",
            "openvino int8 defaults": "int8-defaults",
            "openvino int4": "int4",
            "openvino int4 defaults": "int4-defaults",
        },
    ),
    "llama-cpp": Rival(
        "llama_cpp",
        "scripts/rival_env.sh llama-cpp",
        {
            "llama-cpp": "",
            "llama-cpp Q8_0": "q8_0",
            "llama-cpp Q4_0": "q4_0",
            "llama-cpp Q4_K_M": "q4_k_m",
            "llama-cpp KV Q8_0": "kv_q8_0",
            "llama-cpp flash": "flash",
            "llama-cpp no flash": "no_flash",
        },
    ),
}
"""By name; the worker is benchmarks/rivals/NAME.py, with _ for -."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--compare", nargs="+", choices=RIVALS, metavar="ENGINE", help=f"measure beside {', '.join(RIVALS)}")
    lines = [line for rival in RIVALS.values() for line in rival.modes]
    add("--lines", nargs="+", choices=lines, metavar="LINE", help=f"of these engines only the lines {', '.join(lines)}")
    add("--repeat", type=int, default=3, help="runs of each engine when comparing, in turn")
    add("--run-seconds", type=float, metavar="N", help="leave out an engine one of whose runs takes longer than this")
    for name, rival in RIVALS.items():
        if rival.script:
            text = f"an interpreter that can import {rival.package}, as {rival.script} makes one"
            add(f"--{name}-python", default=sys.executable, metavar="PYTHON", help=text)
    add("--static-batch", type=int, default=32, metavar="N", help="sequences in transformers' padded batches")


def check_interpreters(args: argparse.Namespace) -> None:
    """Raise a ValueError for a rival that its interpreter cannot import."""
    for name in args.compare:
        rival = RIVALS[name]
        python = _interpreter(args, name)
        look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({rival.package!r}) is None)"
        try:
            found = subprocess.run([python, "-c", look], capture_output=True).returncode == 0
        except OSError:
            found = False
        if not found:
            mend = f"`{rival.script} DIR` makes one, DIR/bin/python" if rival.script else "pip installs it"
            raise ValueError(f"--{name}-python is {python!r}, which has no {rival.package}: {mend}")


def compare(
    args: argparse.Namespace, shape: dict[str, Any] | None, workload: Workload, dtype: torch.dtype, machine: Machine
) -> dict[str, Any]:
    """Run every engine args.repeat times; print and return medians and ratios.

    Args:
        shape: config.json's content if random weights of that shape are wanted; None for the checkpoint args.model.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanovllm" / "bench"
    if shape is None:
        model = open_model(args.model, PATTERNS)
    else:
        model = ModelFolder(cache / f"{args.model.lower()}-{str(dtype).removeprefix('torch.')}")
        write_checkpoint(shape, dtype, model.path)
    path = model.path.resolve()
    warm_up = workload.warm_up(model.config["vocab_size"])
    runs: dict[str, list[dict[str, Any]]] = {}
    left_out: dict[str, str] = {}
    with exit_on_signals(), tempfile.TemporaryDirectory() as scratch:
        spec = Path(scratch) / "spec.json"
        spec.write_text(json.dumps(_specification(args, path, cache / "exports", workload, warm_up, dtype)))
        commands = _commands(args, path, dtype, machine, spec)
        for turn in range(args.repeat):
            for line in [line for line in commands if line not in left_out]:
                log = None if line.startswith("nanovllm") else cache / f"{line.replace(' ', '-')}.log"
                result = run_engine(commands[line], log, args.run_seconds)
                if (made := result.get("num_output_tokens", 0)) != sum(workload.output_lens):
                    result.setdefault("cannot_run", f"it made {made} of {sum(workload.output_lens)} tokens")
                if "cannot_run" in result:
                    left_out[line] = result["cannot_run"]
                    print(f"left out   {line}: {left_out[line]}", flush=True)
                else:
                    runs.setdefault(line, []).append(result)
                    rate = f"{_rate(result):10,.1f} output tok/s"
                    print(f"run {turn + 1}      {line:24s} {result['seconds']:8.3f} s {rate}", flush=True)
    return _report({line: runs[line] for line in runs if line not in left_out}) | {"left_out": left_out}


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that whoever started a rival ends it on the way out.

    A rival has a session of its own: neither the signal nor the end of this process would reach it.
    """

    def leave(number: int, _: object) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interpreter(args: argparse.Namespace, name: str) -> str:
    python: str = getattr(args, f"{name.replace('-', '_')}_python", sys.executable)
    return python


def _commands(
    args: argparse.Namespace, model: Path, dtype: torch.dtype, machine: Machine, spec: Path
) -> dict[str, list[str]]:
    """Return the command that measures each line of the table."""
    ours = [sys.executable, str(ROOT / "bench.py"), *_own_arguments(args), "--model", str(model)]
    ours += ["--dtype", str(dtype).removeprefix("torch."), "--machine-rates"]
    ours += [str(rate) for rate in (machine.copy_rate, machine.read_rate, machine.matmul_rate)]
    commands = {"nanovllm": ours}
    if args.quantization is not None:
        commands[f"nanovllm {args.quantization}"] = [*ours, "--quantization", args.quantization]
    for name in args.compare:
        worker = [_interpreter(args, name), "-m", f"benchmarks.rivals.{name.replace('-', '_')}", str(spec)]
        modes = RIVALS[name].modes.items()
        commands |= {line: [*worker, mode] for line, mode in modes if args.lines is None or line in args.lines}
    return commands


def _own_arguments(args: argparse.Namespace) -> list[str]:
    """Return the arguments that make bench.py run the same workload with the same options."""
    names = ("num_seqs", "input_len", "output_len", "shared_prefix", "temperature", "seed")
    given = {name: getattr(args, name) for name in names}
    others = [one for one in fields(EngineConfig) if one.name not in ("model", "load_format", "dtype", "quantization")]
    given |= {one.name: value for one in others if (value := getattr(args, one.name)) != one.default}
    arguments = []
    for name, value in given.items():
        option = f"--{'no-' if value is False else ''}{name.replace('_', '-')}"
        if isinstance(value, bool):
            arguments.append(option)
        else:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            arguments += [option, *(map(str, value) if isinstance(value, list) else [text])]
    return arguments


def _specification(
    args: argparse.Namespace, model: Path, exports: Path, workload: Workload, warm_up: Workload, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the document that workers read.

    Args:
        model: a checkpoint's folder, or a GGUF file.
        exports: where the model may be kept in a rival's own format.
    """
    return {
        "model": str(model),
        "exports": str(exports),
        "dtype": str(dtype).removeprefix("torch."),
        "device": "cuda" if torch.cuda.is_available() and args.device != "cpu" else "cpu",
        "threads": torch.get_num_threads(),
        "temperature": args.temperature,
        "max_model_len": max(args.max_model_len, workload.max_len),
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "tensor_parallel_size": args.tensor_parallel_size,
        "static_batch": args.static_batch,
        "workload": vars(workload),
        "warm_up": vars(warm_up),
    }


def make_environment() -> dict[str, str]:
    """Return the variables of a run: the same threads for everybody.

    vLLM for CPUs keeps cores for itself unless it is told which to use.
    """
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


def run_engine(command: list[str], log: Path | None, run_seconds: float | None) -> dict[str, Any]:
    """Run a command and return the JSON document in its last line (bench.py's own has its result inside).

    Args:
        log: the file that keeps the output of a run that fails, or takes too long; the document then says so. None:
            such a run raises a RuntimeError.
    """
    process = subprocess.Popen(
        command,
        env=make_environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",  # a process that is ended may end within a character
        start_new_session=True,
    )
    try:
        out, errors = process.communicate(timeout=run_seconds if log else None)
    except subprocess.TimeoutExpired:
        _end(process)
        _keep(log, _read_rest(process))
        late = f"it had not ended after {run_seconds:g} seconds, start included (--run-seconds)"
        return {"cannot_run": f"{late}, with all it said in {log}"}
    finally:
        _end(process)
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if process.returncode == 0 and lines:
        document = json.loads(lines[-1])
        result: dict[str, Any] = document.get("result", document)
        result.setdefault("versions", document.get("versions"))
        return result
    if log is None:
        raise RuntimeError(f"{' '.join(command)} failed:\n{(out + errors)[-4000:]}")
    _keep(log, out + errors)
    last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), f"exit {process.returncode}")
    return {"cannot_run": f"it failed, with all it said in {log}: {last}"}


def _keep(log: Path | None, output: str) -> None:
    """Write what a rival said to its file. Our own runs, which raise errors, have none."""
    assert log is not None
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(output)


def _read_rest(process: subprocess.Popen[str]) -> str:
    """Return what a process that was ended had said. A process that it started in a session of its own may still run
    and hold the pipes open, so this does not wait for long."""
    try:
        return "".join(process.communicate(timeout=10))
    except subprocess.TimeoutExpired:
        return "one of its processes runs on, so what it said cannot be read\n"


def _end(process: subprocess.Popen[str]) -> None:
    """End the run's processes, and those that they started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _rate(result: dict[str, Any]) -> float:
    rate: float = result["num_output_tokens"] / result["seconds"]
    return rate


def _report(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    rates = {line: [_rate(result) for result in results] for line, results in runs.items()}
    medians = {line: statistics.median(values) for line, values in rates.items()}
    ours = [line for line in medians if line.startswith("nanovllm")][-1]  # the quantised one, if there is one
    ratios = {line: medians[ours] / median for line, median in medians.items()}
    titles = ("output tok/s", "lowest", "highest", "ours / its", "load + warm-up s")
    print("\n{:28s} {:>12s} {:>8s} {:>8s} {:>10s} {:>17s}".format("engine", *titles))
    for line, values in rates.items():
        before = statistics.median(r["load_seconds"] + r["warm_up_seconds"] for r in runs[line])
        label = f"{line} {runs[line][0]['versions'].get(line.split()[0], '')}"
        numbers = f"{medians[line]:12,.1f} {min(values):8,.1f} {max(values):8,.1f} {ratios[line]:10.2f} {before:17.1f}"
        print(f"{label:28s} {numbers}  {runs[line][0].get('note', '')}".rstrip())
    return {"medians": medians, "ratios": ratios, "runs": runs}
