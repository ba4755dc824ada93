"""Times GGUF files here and in llama.cpp, in two processes that live side by side and take turns.

    python benchmarks/evidence/bench_gguf.py --llama-cpp-python DIR/bin/python --make-only    writes the files
    python benchmarks/evidence/bench_gguf.py --llama-cpp-python DIR/bin/python
    python benchmarks/evidence/bench_gguf.py --llama-cpp-python DIR/bin/python --llama-cpp-avx2-python DIR2/bin/python \
        --save benchmarks/results/zen4-gguf.json

The models have random weights, and llama.cpp's own tool quantises them. Of Qwen3-4B there are a quarter of the layers
and a quarter of the vocabulary, so that each part has the share of the time that it has in the whole model. A round has
each work once, ours and llama.cpp's one after the other; each round changes who comes first. "1 sequence" to "32
sequences" are decode steps from an empty context, with greedy sampling. llama.cpp has its own defaults for n_ubatch and
flash attention, and keys and values in float16; ours are in bfloat16. DIR2 has a llama.cpp that was built for AVX2
alone (CMAKE_ARGS of scripts/rival_env.sh); then ours is, too. --save writes the tables that benchmarks/make_tables.py
reads. The last line is one JSON document.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.bench_compare import ROOT, make_environment
from benchmarks.bench_workload import write_checkpoint
from benchmarks.figures import update
from benchmarks.measuring import commit
from benchmarks.rivals.worker import Engine
from benchmarks.rivals.worker import main as work
from nanovllm.apps.floor import measure_machine
from nanovllm.features.shapes import preset_config

SHAPES: dict[str, dict[str, int]] = {
    "qwen3-0.6b": {},
    "qwen3-4b": {"num_hidden_layers": 9, "vocab_size": 37984},
}
"""{a shape: what differs from it}."""
TYPES = ("Q4_0", "Q4_K_M", "Q8_0")
WORKS = {"1 sequence": (1, 1, 24), "8 sequences": (8, 1, 8), "32 sequences": (32, 1, 6), "a prompt of 512": (1, 512, 1)}
"""{a work: sequences, prompt tokens, output tokens}."""
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
QUANTIZE = """
import sys
from pathlib import Path
from benchmarks.rivals.llama_cpp import llama_cpp, print_errors, quantize
llama_cpp.llama_log_set(print_errors, None)
print(quantize(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], "BF16"))
"""
Times = dict[str, list[tuple[float, float]]]
"""{a work: the seconds of both engines, ours first, in each round}."""


def load(spec: dict[str, Any], _: str) -> Engine:
    """Make our engine, as a worker of benchmarks/rivals does."""
    from nanovllm import LLM, SamplingParams
    from nanovllm.backends.cpu import library

    if spec["avx2"]:
        library.FLAGS = tuple("-march=x86-64-v3" if flag == library.NATIVE else flag for flag in library.FLAGS)
    longest = max(map(len, spec["workload"]["prompts"]))
    options: dict[str, Any] = {"attention_backend": "cpu", "enable_prefix_caching": False, "max_num_seqs": 32}
    llm = LLM(spec["model"], dtype=spec["dtype"], max_model_len=longest + 32, **options)

    def run(workload: dict[str, Any]) -> int:
        params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=n) for n in workload["output_lens"]]
        outputs = llm.generate(workload["prompts"], params, use_tqdm=False)
        return sum(len(output["token_ids"]) for output in outputs)

    return Engine(run, "")


def make_file(python: str, shape: str, type_name: str) -> Path:
    """Return the file of a shape in a type of llama.cpp's. It is written unless it is there."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanovllm" / "bench"
    config = preset_config(shape) | SHAPES[shape]
    folder = cache / f"{shape}-{config['num_hidden_layers']}-layers-bfloat16"
    write_checkpoint(config, torch.bfloat16, folder)
    command = [python, "-c", QUANTIZE, str(folder), str(cache / "exports"), type_name]
    made = subprocess.run(command, env=make_environment(), cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return Path(made.stdout.splitlines()[-1])


def make_workload(num_seqs: int, num_prompt_tokens: int, num_tokens: int) -> dict[str, Any]:
    prompts = [[10 + (7 * i + 13 * j) % 9000 for j in range(num_prompt_tokens)] for i in range(num_seqs)]
    return {"prompts": prompts, "output_lens": [num_tokens] * num_seqs}


@contextmanager
def start_engines(python: str, file: Path, avx2: bool) -> Iterator[list[subprocess.Popen[str]]]:
    """Start both engines on a file, ours first, wait until they have loaded, and end them on the way out."""
    workloads = [make_workload(*sizes) for sizes in WORKS.values()]
    spec = {
        "takes_turns": True,
        "model": str(file),
        "dtype": "bfloat16",
        "threads": torch.get_num_threads(),
        "temperature": 0,
        "max_num_seqs": 32,
        "workload": {name: [one for work in workloads for one in work[name]] for name in workloads[0]},
        "avx2": avx2,
    }
    environment = make_environment() | (AVX2 if avx2 else {})
    engines: list[subprocess.Popen[str]] = []
    with tempfile.NamedTemporaryFile("w", suffix=".json") as scratch:
        json.dump(spec, scratch)
        scratch.flush()
        ours = [sys.executable, __file__, scratch.name]
        theirs = [python, "-m", "benchmarks.rivals.llama_cpp", scratch.name]
        try:
            for command in (ours, theirs):
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
                engines.append(subprocess.Popen(command, env=environment, cwd=ROOT, text=True, **pipes))
                said = json.loads(read_line(engines[-1]))
                if "cannot_run" in said:
                    raise RuntimeError(said["cannot_run"])
            yield engines
        finally:
            for engine in engines:
                engine.kill()
                engine.wait()


def read_line(engine: subprocess.Popen[str]) -> str:
    """Return the next line of an engine that is a document or a number."""
    assert engine.stdout is not None
    for line in engine.stdout:
        if line[0] in "{0123456789":
            return line
    raise RuntimeError("an engine ended; it has said why")


def ask(engine: subprocess.Popen[str], sizes: tuple[int, int, int]) -> float:
    """Return the seconds of a work."""
    assert engine.stdin is not None
    engine.stdin.write(json.dumps(make_workload(*sizes)) + "\n")
    engine.stdin.flush()
    return float(read_line(engine))


def measure(python: str, file: Path, avx2: bool, seconds: float) -> Times:
    """Let both engines take turns for so many seconds, and two rounds at least."""
    found: Times = {name: [] for name in WORKS}
    with start_engines(python, file, avx2) as engines:
        for num_seqs, num_prompt_tokens, _ in WORKS.values():
            for engine in engines:
                ask(engine, (num_seqs, min(num_prompt_tokens, 64), 2))
        start = time.monotonic()
        order = [0, 1]
        while time.monotonic() - start < seconds or len(found["1 sequence"]) < 2:
            for name, sizes in WORKS.items():
                took = {i: ask(engines[i], sizes) for i in order}
                found[name].append((took[0], took[1]))
            order.reverse()
    return found


def make_rows(type_name: str, times: Times) -> dict[str, list[Any]]:
    """Return the rows of a file: the tokens a second of the middle run, and how many times as fast ours is."""
    rows: dict[str, list[Any]] = {f"ours, {type_name}": [], f"llama.cpp, {type_name} †": []}
    for name, pairs in times.items():
        num_seqs, num_prompt_tokens, num_tokens = WORKS[name]
        num_counted = num_prompt_tokens if num_tokens == 1 else num_seqs * num_tokens
        ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
        of_pairs = statistics.median(b / a for a, b in pairs)
        rates = [f"{num_counted / seconds:.1f}" for seconds in (ours, theirs)]
        print(
            f"{type_name:8} {name:16} {rates[0]:>8} {rates[1]:>8} tok/s, llama.cpp's time / ours: "
            f"{theirs / ours:.2f}, median of {len(pairs)} pairs {of_pairs:.2f}",
            flush=True,
        )
        rows[f"ours, {type_name}"].append(rates[0])
        rows[f"llama.cpp, {type_name} †"].append({"figures": rates[1], "ratio": f"{theirs / ours:.2f}"})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--llama-cpp-python", required=True, metavar="PYTHON", help="as scripts/rival_env.sh llama-cpp makes one")
    add("--llama-cpp-avx2-python", metavar="PYTHON", help="the same, built for AVX2 alone")
    add("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    add("--types", nargs="+", choices=TYPES, default=list(TYPES))
    add("--seconds", type=float, default=45, help="begin no further round of a file after this time")
    add("--make-only", action="store_true", help="write the files, and time nothing")
    add("--save", type=Path, metavar="FILE", help="write tables and commit into this file of benchmarks/results")
    args = parser.parse_args()
    files = {
        (shape, kind): make_file(args.llama_cpp_python, shape, kind) for shape in args.shapes for kind in args.types
    }
    for (shape, kind), file in files.items():
        print(f"{shape} {kind}: {file.stat().st_size / 1e9:.2f} GB, {file}", flush=True)
    if args.make_only:
        return
    builds = {"": args.llama_cpp_python, " with AVX2 alone": args.llama_cpp_avx2_python}
    tables = {}
    times: dict[str, Times] = {}
    rate = measure_machine(torch.device("cpu"), torch.bfloat16).read_rate / 1e9
    for build, python in builds.items():
        for shape in args.shapes if python else []:
            rows: dict[str, list[Any]] = {}
            for kind in args.types:
                print(f"\n{shape}{build}", flush=True)
                times[f"{shape} {kind}{build}"] = measure(python, files[shape, kind], bool(build), args.seconds)
                rows |= make_rows(kind, times[f"{shape} {kind}{build}"])
            tables[f"{shape.replace('qwen', 'Qwen').replace('b', 'B')}{build}"] = {"columns": list(WORKS), "rows": rows}
    if args.save:
        update(args.save, tables, commit=commit(), ceiling=f"before, memory gave {rate:.1f} GB/s")
    print(json.dumps({"benchmark": "gguf", "commit": commit(), "tables": tables, "seconds": times}))


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        work(load, {})
    else:
        main()
