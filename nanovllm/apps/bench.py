"""Measures throughput, and compares it with its ceiling: the command `nanovllm bench`. bench.py adds other engines.

First it prints the cost card: the bytes that the workload must read, the FLOPs that it must compute, and how fast this
machine copies, reads and multiplies now. From these follows the floor: the least seconds that the workload can take,
added up step by step. Then it prints the run, and how many percent of the run's time the floor is. Loading and warm-up
are reported, but they are not part of the run's time. The last line is one JSON document with all figures.
"""

import argparse
import importlib.metadata
import json
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from nanovllm.apps.cli import add_engine_options, read_engine_config
from nanovllm.apps.doctor import name_device
from nanovllm.apps.estimate import fetch_config
from nanovllm.apps.floor import Cost, Machine, Model, Step, ideal_steps, measure_machine, step_cost
from nanovllm.config import USUAL_LENGTH, EngineConfig
from nanovllm.engine.plan import StepResult
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.features.shapes import PRESETS, preset_config
from nanovllm.llm import LLM
from nanovllm.load import resolve_options
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.clock import Clock
from nanovllm.version import __version__

WORKLOADS = {"cpu": {"num_seqs": 32, "input_len": [16, 128], "output_len": [16, 128], "dtype": "bfloat16"}}
"""The values of --preset, and which defaults each of them changes."""
WARM_UP_LEN = 1024
"""Most tokens of a prompt of the warm-up: a longer one would take as long as the run, and warm nothing more."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a measurement to a parser."""
    add = parser.add_argument
    add("--model", default="qwen3-0.6b", help=f"a folder, a Hugging Face id, or a shape: {', '.join(PRESETS)}")
    add("--load-format", choices=("auto", "dummy"), help="dummy: random weights, the default for a shape")
    add("--preset", choices=WORKLOADS, help="cpu: 32 requests of 16..128 tokens in and out, in bfloat16; options win")
    add("--num-seqs", type=int, default=256, help="number of requests")
    add("--input-len", type=int, nargs=2, default=[100, 1024], metavar=("LO", "HI"), help="prompt lengths")
    add("--output-len", type=int, nargs=2, default=[100, 1024], metavar=("LO", "HI"), help="output lengths")
    add("--shared-prefix", type=int, default=0, metavar="N", help="put the same N tokens before every prompt")
    add("--temperature", type=float, default=0.6)
    add("--seed", type=int, default=0, help="seed of the workload")
    add("--threads", type=int, help="CPU threads; default: OMP_NUM_THREADS, or the physical cores")
    add("--machine-rates", type=float, nargs=3, metavar="RATE", help="use these copy, read and matmul rates")
    add_engine_options(parser, without=("model", "load_format", "seed", "data_parallel_size"))
    parser.set_defaults(max_model_len=USUAL_LENGTH)


def read_options(parser: argparse.ArgumentParser, arguments: list[str] | None = None) -> argparse.Namespace:
    """Read a command line, with all options of an engine. A preset changes defaults, so options win."""
    parser.set_defaults(**WORKLOADS.get(parser.parse_known_args(arguments)[0].preset, {}))
    args = parser.parse_args(arguments)
    if args.load_format is None:
        args.load_format = "dummy" if args.model.lower() in PRESETS else "auto"
    return argparse.Namespace(**vars(args) | vars(read_engine_config(args)))


@dataclass(frozen=True)
class Workload:
    """Prompts as token ids, and the number of tokens to generate for each."""

    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def lengths(self) -> list[tuple[int, int]]:
        return [(len(prompt), output) for prompt, output in zip(self.prompts, self.output_lens, strict=True)]

    @property
    def max_len(self) -> int:
        return max(prompt + output for prompt, output in self.lengths)

    def warm_up(self, vocab_size: int) -> "Workload":
        """Return the beginnings of all prompts, with other tokens, and outputs of 4: no cache holds this workload."""
        ids = min(vocab_size, 10000)
        prompts = [[(token + 5003) % ids for token in prompt[:WARM_UP_LEN]] for prompt in self.prompts]
        return Workload(prompts, [min(4, output) for output in self.output_lens])


def make_workload(
    num_seqs: int,
    input_len: tuple[int, int],
    output_len: tuple[int, int],
    vocab_size: int,
    shared_prefix: int = 0,
    seed: int = 0,
) -> Workload:
    """Make a workload. With bench.py's defaults it is nano-vLLM's: the same generator, drawn from in the same order.

    It draws the prompts first: the length of each, then its ids in 0..10000, modulo the vocabulary's size. Then it
    draws all output lengths, and last the shared prefix, which makes every prompt longer.
    """
    random = Random(seed)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(*input_len))] for _ in range(num_seqs)]
    output_lens = [random.randint(*output_len) for _ in range(num_seqs)]
    prefix = [random.randint(0, 10000) for _ in range(shared_prefix)]
    return Workload([[token % vocab_size for token in prefix + prompt] for prompt in prompts], output_lens)


class Recorder:
    """Observes an engine. It keeps the work of each step, and the seconds on the device and on the host."""

    def __init__(self, device: torch.device) -> None:
        self._launch_computes = device.type == "cpu"
        self.steps: list[Step] = []
        self.device_seconds: list[float] = []
        self.host_seconds: list[float] = []

    def planned(self, number: int, at: float, step: ScheduledStep) -> None:
        plan = step.plan
        work = list(zip(plan.num_computed.tolist(), plan.num_scheduled.tolist(), strict=True))
        self.steps.append((work, int(plan.num_sampled.sum() + plan.num_scored.sum())))

    def finished(self, number: int, step: ScheduledStep, clock: Clock, result: StepResult) -> None:
        device = result.device_seconds
        host = sum(seconds for name, _, seconds in clock.spans if name not in ("wait", "draft"))
        self.device_seconds.append(device)
        self.host_seconds.append(host - device if self._launch_computes else host)

    def close(self) -> None:
        pass


def run_engine(
    config: EngineConfig, temperature: float, workload: Workload, vocab_size: int, device: torch.device
) -> dict[str, Any]:
    """Load the engine, warm up and run the workload. Return the times, the counts and the recorder of the steps."""
    options = vars(config).copy()
    start = time.perf_counter()
    llm = LLM(options.pop("model"), **options)
    loaded = time.perf_counter()

    def run(work: Workload) -> int:
        params = [SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=n) for n in work.output_lens]
        outputs = llm.generate(work.prompts, params, use_tqdm=False)
        torch.get_device_module(device).synchronize(device)
        return sum(len(output["token_ids"]) for output in outputs)

    with llm:
        run(workload.warm_up(vocab_size))
        recorder = Recorder(device)
        llm.observe(recorder)
        before = llm.stats()
        warm = time.perf_counter()
        num_output_tokens = run(workload)
        seconds = time.perf_counter() - warm
        stats = {name: count - before[name] for name, count in llm.stats().items() if name.startswith("num_")}
        return {
            "load_seconds": loaded - start,
            "warm_up_seconds": warm - loaded,
            "seconds": seconds,
            "num_output_tokens": num_output_tokens,
            "num_preemptions": stats["num_preemptions"],
            "num_cached_tokens": stats["num_cached_tokens"],
            "recorder": recorder,
        }


def evaluate(run: dict[str, Any], workload: Workload, model: Model, machine: Machine, floor: Cost) -> dict[str, Any]:
    """Return the figures of a run: rates, achieved bandwidth and FLOPs, percent of the floor."""
    recorder: Recorder = run.pop("recorder")
    phases = {"prefill": (Cost(), 0.0, 0), "decode": (Cost(), 0.0, 0)}
    for (work, num_sampled), seconds in zip(recorder.steps, recorder.device_seconds, strict=True):
        # If every token needs logits, the step only decodes and verifies drafts: most tokens of a prompt need none.
        name = "decode" if sum(scheduled for _, scheduled in work) == num_sampled else "prefill"
        cost, total, count = phases[name]
        phases[name] = cost + step_cost(model, machine, work, num_sampled), total + seconds, count + 1
    num_steps = len(recorder.steps)
    num_prompt_tokens = sum(map(len, workload.prompts))
    result = run | {
        "output_tokens_per_second": run["num_output_tokens"] / run["seconds"],
        "total_tokens_per_second": (run["num_output_tokens"] + num_prompt_tokens) / run["seconds"],
        "percent_of_floor": 100 * floor.seconds / run["seconds"],
        "num_steps": num_steps,
        "mean_batch": sum(len(work) for work, _ in recorder.steps) / num_steps,
        "host_ms_per_step": 1000 * sum(recorder.host_seconds) / num_steps,
    }
    for name, (cost, seconds, count) in phases.items():
        rates = (
            {"gb_per_second": cost.bytes / seconds / 1e9, "tflop_per_second": cost.flops / seconds / 1e12}
            if count
            else {}
        )
        result[name] = {"steps": count, "seconds": seconds, "floor_seconds": cost.seconds} | rates
    return result


def describe(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return facts about the measurement: machine, threads, dtype, versions."""
    installed = {dist.metadata["Name"]: dist.version for dist in importlib.metadata.distributions()}
    return {
        "machine": name_device(device),
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
        "versions": {"nanovllm": __version__, "python": platform.python_version(), "torch": torch.__version__}
        | {name: installed[name] for name in ("transformers", "triton", "flash-attn") if name in installed},
    }


def print_cost_card(model: Model, machine: Machine, workload: Workload, floor: Cost, about: dict[str, Any]) -> None:
    num_prompt = sum(map(len, workload.prompts))
    num_output = sum(workload.output_lens)
    copies = machine.copy_rate / 1e9
    reads = machine.read_rate / 1e9
    rate = num_output / floor.seconds
    print(f"machine    {about['machine']}, {about['threads']} threads, torch {about['versions']['torch']}")
    print(
        f"           copies {copies:,.1f} GB/s (read and write), reads {reads:,.1f} GB/s, "
        f"multiplies {machine.matmul_rate / 1e12:,.2f} TFLOP/s in {about['dtype']}"
    )
    print(
        f"model      {model.sizes.num_parameters / 1e9:.3f} B parameters, {model.weight_bytes / 1e9:.3f} GB; "
        f"{model.kv_bytes_per_token:,} B of KV and {model.flops_per_token / 1e9:.2f} GFLOP a token"
    )
    print(f"workload   {len(workload.prompts)} requests, {num_prompt:,} prompt and {num_output:,} output tokens")
    print(
        f"floor      {floor.seconds:.3f} s, {rate:,.1f} output tok/s: "
        f"{floor.bytes / 1e9:,.1f} GB and {floor.flops / 1e12:,.2f} TFLOP"
    )
    largest = sorted(floor.parts.items(), key=lambda part: -part[1])
    parts = (f"{name} {seconds:.3f} s ({seconds / floor.seconds:.0%})" for name, seconds in largest)
    print(f"           {', '.join(parts)}", flush=True)


def print_result(result: dict[str, Any]) -> None:
    print(
        f"result     {result['seconds']:.3f} s, {result['output_tokens_per_second']:,.1f} output tok/s, "
        f"{result['total_tokens_per_second']:,.1f} total tok/s: {result['percent_of_floor']:.1f} % of the floor"
    )
    print(
        f"steps      {result['num_steps']}, mean batch {result['mean_batch']:.1f}, "
        f"{result['num_preemptions']} preemptions, host {result['host_ms_per_step']:.3f} ms a step"
    )
    for name in ("prefill", "decode"):
        if (phase := result[name])["steps"]:
            rates = f"{phase['gb_per_second']:,.1f} GB/s, {phase['tflop_per_second']:,.3f} TFLOP/s"
            steps = f"{phase['seconds']:.3f} s in {phase['steps']} steps (floor {phase['floor_seconds']:.3f} s)"
            print(f"{name:10s} {steps}: {rates}")
    before = f"load {result['load_seconds']:.1f} s, warm-up {result['warm_up_seconds']:.1f} s"
    print(f"before     {before}")


def measure(args: argparse.Namespace, about: Mapping[str, Any], compare: Callable[..., Any] | None = None) -> None:
    """Print the cost card, the run, and the document of all figures.

    Args:
        about: further facts for the document.
        compare: runs other engines beside this one, in place of the run: see benchmarks/bench_compare.py.
    """
    if args.threads:
        torch.set_num_threads(args.threads)
    is_shape = args.model.lower() in PRESETS
    hf_config = fetch_config(args.model)
    vocab = hf_config.vocab_size
    lengths = tuple(args.input_len), tuple(args.output_len)
    workload = make_workload(args.num_seqs, *lengths, vocab, args.shared_prefix, args.seed)
    args.max_model_len = max(args.max_model_len, workload.max_len)
    config = read_engine_config(args)
    resolved = resolve_options(config, hf_config)
    args.max_num_seqs = resolved.max_num_seqs
    device = torch.device(resolved.device)
    dtype = getattr(torch, resolved.dtype)
    model = Model.of(resolved, hf_config)
    machine = Machine(*args.machine_rates) if args.machine_rates else measure_machine(device, dtype)
    whole = machine.times(resolved.num_devices)
    limits = (resolved.max_num_seqs, resolved.max_num_batched_tokens)
    steps = ideal_steps(workload.lengths, *limits, args.shared_prefix)
    floor = sum((step_cost(model, whole, *step) for step in steps), Cost())
    about = describe(device, dtype) | dict(about)
    print_cost_card(model, whole, workload, floor, about)
    document = {
        "benchmark": "throughput",
        **about,
        "arguments": vars(args),
        "cost": model.describe(),
        "rates": vars(whole),
        "floor": vars(floor),
    }
    if compare is not None:
        document["comparison"] = compare(
            args, preset_config(args.model.lower()) if is_shape else None, workload, dtype, machine
        )
    else:
        result = evaluate(run_engine(config, args.temperature, workload, vocab, device), workload, model, whole, floor)
        print_result(result)
        document["result"] = result
    print(json.dumps(document))
