"""Describes this machine as the engine sees it: `nanovllm doctor`, whose output belongs into a bug report."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nanovllm.apps.estimate import describe_code, fetch_config
from nanovllm.backends import NAMES
from nanovllm.backends.cpu.library import cache_folder, describe_danger, find_compiler
from nanovllm.models.sizes import Sizes, read_dtype
from nanovllm.runner.resolve import (
    Work,
    find_heads,
    list_candidates,
    resolve_device,
    resolve_dtype,
    why_cannot,
)
from nanovllm.utils.machine import limit_threads, list_sockets, physical_cores
from nanovllm.utils.memory import find_memory_limits, free_memory
from nanovllm.version import __version__

if TYPE_CHECKING:
    from transformers import PretrainedConfig

PACKAGES = ("torch", "triton", "flash-attn", "transformers", "tokenizers", "safetensors", "huggingface-hub", "numpy")
EXTRAS = ("xxhash", "llguidance", "gguf", "ray", "lm_eval")
VARIABLES = ("OMP_NUM_THREADS", "CXX", "CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_ENDPOINT", "HF_HUB_OFFLINE")
FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
"""Flags of processors that decide how fast the CPU kernels are."""


def describe(model: str) -> str:
    """Return the report.

    Args:
        model: whose backend is chosen: a folder, a config.json, an id or a shape.

    Raises:
        ValueError: there is no such model.
    """
    config = fetch_config(model)
    sections = {
        "versions": describe_versions(),
        "machine": describe_machine(),
        "memory": describe_memory(),
        f"backends for {model}": describe_backends(config),
    }
    lines = []
    for title, facts in sections.items():
        lines.append(title)
        lines += [f"  {name:<20} {value}" for name, value in facts]
    return "\n".join(lines)


def describe_versions() -> Iterator[tuple[str, str]]:
    yield "nano-vllm", f"{__version__}, {Path(__file__).parents[1]}"
    yield "python", f"{platform.python_version()}, {sys.executable}"
    for name in (*PACKAGES, *EXTRAS):
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "not installed"


def describe_machine() -> Iterator[tuple[str, str]]:
    yield "system", platform.platform()
    model, flags = read_processor()
    yield "processor", f"{model}, {platform.machine()}"
    yield "its features", " ".join(name for name in FEATURES if name in flags) or "none that the CPU kernels use"
    yield "cores", f"{physical_cores()} that this process may use, {os.cpu_count()} hardware threads in all"
    limit_threads()
    yield "threads", f"{torch.get_num_threads()} in torch and the CPU kernels"
    compiler = find_compiler()
    yield "compiler", describe_compiler(compiler) if compiler else "none is found (install g++)"
    danger = describe_danger(cache_folder())
    yield "compiled kernels", str(cache_folder()) if danger is None else f"not kept: {danger}"
    if not torch.cuda.is_available():
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs only"
        yield "GPU", f"none that torch can use (torch is built for {build})"
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(i)
        capability = "{}.{}".format(*torch.cuda.get_device_capability(i))
        sizes = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        yield f"GPU {i}", f"{torch.cuda.get_device_name(i)}, compute capability {capability}, {sizes}"
    for name in VARIABLES:
        if name in os.environ:
            yield name, os.environ[name]


def read_processor() -> tuple[str, set[str]]:
    """Return the name of the processor and its flags, as /proc/cpuinfo has them."""
    facts: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            facts.setdefault(name.strip().lower(), value.strip())
    except OSError:
        pass
    flags = facts.get("flags") or facts.get("features") or ""
    return facts.get("model name") or platform.processor() or "unknown", set(flags.split())


def name_device(device: torch.device) -> str:
    """Return the name of a GPU; of a CPU also how many hardware threads this process may use."""
    if device.type != "cpu":
        return str(torch.get_device_module(device.type).get_device_name(device))
    num_cpus = sum(len(core) for cores in list_sockets() for core in cores)
    return f"{read_processor()[0]}, {num_cpus} CPUs"


def describe_compiler(compiler: str) -> str:
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{compiler} does not run: {error}"
    return next(iter(done.stdout.splitlines()), compiler)


def describe_memory() -> Iterator[tuple[str, str]]:
    limits = find_memory_limits()
    yield "free", f"{free_memory() / 2**30:.2f} GiB, {'within the limits below' if limits else 'without a limit'}"
    for name, limit in limits.items():
        yield name, f"{limit / 2**30:.2f} GiB"
    shared = Path("/dev/shm")
    if shared.is_dir():
        yield str(shared), f"{shutil.disk_usage(shared).free / 2**30:.2f} GiB free"


def describe_backends(config: "PretrainedConfig") -> Iterator[tuple[str, str]]:
    """Yield what "auto" becomes for a model, and for each backend whether it can run and why not."""
    device = resolve_device("auto")
    dtype = read_dtype(config)
    sizes = Sizes(config)
    variants = sizes.list_variants()
    work = Work(device, dtype, *find_heads(sizes), num_parameters=sizes.num_parameters, variants=variants)
    work = work._replace(dtype=resolve_dtype("auto", "auto", work))
    yield "runs", describe_code(sizes)
    yield "device", str(device)
    yield "dtype", f"{str(work.dtype).removeprefix('torch.')} (the model has {str(dtype).removeprefix('torch.')})"
    candidates = list_candidates("auto", work)
    reasons = {name: why_cannot(name, work) for name in NAMES}
    chosen = next((name for name in candidates if reasons[name] is None), None)
    for name, reason in reasons.items():
        verdict = "can run" if reason is None else f"cannot run: {reason}"
        if name == chosen:
            verdict = f"chosen: the first that can run, of {', '.join(candidates)}"
        yield f"{name} backend", verdict
