"""Times the log-likelihoods of a multiple choice: lm-evaluation-harness with this engine, and with llama.cpp.

    python benchmarks/evidence/bench_loglikelihoods.py X.gguf --llama-cpp-python DIR/bin/python --server 100

Each question of sums has five solved ones before it, and four answers: four pairs of a context and a continuation. The
engines take turns; each round loads a model anew, and loading is not timed. They are:

* "ours": the model of `nanovllm eval`, which runs all pairs at once;
* "server": the harness's own model `gguf`, which asks llama-cpp-python's server for one pair after the other. The
  interpreter needs `llama-cpp-python[server]`. For each token the server sorts the vocabulary, in Python;
* "decode": `llama_decode` for one pair after the other, which is what llama.cpp itself needs. What a pair has in common
  with the one before is not computed again. The server does likewise.

`--ours`, `--server` and `--decode` say how many pairs are measured, and the times are those of 1,000. Processor time is
that of all threads: on a busy machine it says more than seconds do.
"""

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.measuring import commit
from nanovllm.apps.doctor import read_processor
from scripts import tiny_qwen3_data as data

NUM_CHOICES = 4
NUM_SHOTS = 5
CONTEXT = 1024
"""Tokens that a pair may have."""
ROOT = Path(__file__).parents[2]


class Pair(NamedTuple):
    """A context and one of its continuations."""

    context: str
    continuation: str


class Timing(NamedTuple):
    """Seconds, seconds of processors, and the log-likelihood of each pair that was scored."""

    seconds: float
    processor: float
    found: list[float]


def make_pairs(num_pairs: int) -> list[Pair]:
    """Return the pairs of as many questions as are needed. The built-in model was not trained with them.

    No context ends with a space or a new line: the harness would move it to the continuation.
    """
    num_questions = -(-num_pairs // NUM_CHOICES)
    examples = data.evaluation_set("add", NUM_SHOTS + num_questions)
    shots = "".join(f"Question: {example.question}\nAnswer: {example.answer}\n" for example in examples[:NUM_SHOTS])
    rng = random.Random(0)
    pairs = []
    for example in examples[NUM_SHOTS:]:
        terms, right = example.answer.split(" = ")
        wrong = rng.sample([number for number in range(199) if number != int(right)], NUM_CHOICES - 1)
        for number in sorted([int(right), *wrong]):
            pairs.append(Pair(f"{shots}Question: {example.question}\nAnswer:", f" {terms} = {number}"))
    return pairs


def make_requests(pairs: list[Pair]) -> list[Any]:
    """Return the harness's requests."""
    from lm_eval.api.instance import Instance

    return [Instance("loglikelihood", {}, tuple(pair), index) for index, pair in enumerate(pairs)]


def time_ours(path: str, pairs: list[Pair], options: dict[str, Any]) -> Timing:
    from nanovllm.lm_eval import NanoVLLM

    model = NanoVLLM(path, max_model_len=CONTEXT, device="cpu", attention_backend="cpu", **options)
    requests = make_requests(pairs)
    model.loglikelihood(make_requests([Pair("a", "b")]), disable_tqdm=True)
    start = time.perf_counter()
    processor = time.process_time()
    found = model.loglikelihood(requests, disable_tqdm=True)
    timing = Timing(time.perf_counter() - start, time.process_time() - processor, [value for value, _ in found])
    model.llm.close()
    return timing


def time_server(path: str, pairs: list[Pair], python: str, threads: int) -> Timing:
    from lm_eval.models.gguf import GGUFLM

    with run_server(path, python, threads) as (url, process):
        model = GGUFLM(url)
        model.loglikelihood(make_requests([Pair("a", "b")]), disable_tqdm=True)
        requests = make_requests(pairs)
        start = time.perf_counter()
        processor = time.process_time() + read_processor_time(process)
        found = model.loglikelihood(requests, disable_tqdm=True)
        seconds = time.perf_counter() - start
        processor = time.process_time() + read_processor_time(process) - processor
        return Timing(seconds, processor, [value for value, _ in found])


@contextmanager
def run_server(path: str, python: str, threads: int) -> Iterator[tuple[str, int]]:
    """Run llama-cpp-python's server; yields its address and its process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = {"model": path, "logits_all": True, "n_ctx": CONTEXT, "host": "127.0.0.1", "port": port, "verbose": False}
    options |= {"n_threads": threads, "n_threads_batch": threads}
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    with subprocess.Popen([python, "-m", "llama_cpp.server", *arguments], stdout=subprocess.DEVNULL) as server:
        try:
            url = f"http://127.0.0.1:{port}"
            while not is_up(url):
                if server.poll() is not None:
                    raise RuntimeError("llama-cpp-python's server has ended")
                time.sleep(0.2)
            yield url, server.pid
        finally:
            server.terminate()


def is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=10):
            return True
    except OSError:
        return False


def read_processor_time(process: int) -> float:
    """Return the seconds that the threads of a process have used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def time_decode(path: str, pairs: list[Pair], python: str, threads: int) -> Timing:
    command = [python, "-m", "benchmarks.rivals.llama_cpp_pairs", str(Path(path).resolve()), str(CONTEXT), str(threads)]
    done = subprocess.run(command, input=json.dumps(pairs), stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    return Timing(*json.loads(done.stdout.splitlines()[-1]))


def count_right(pairs: list[Pair], found: list[float]) -> float:
    """Return the share of questions whose likeliest answer is right."""
    firsts = range(0, len(found), NUM_CHOICES)
    num_right = 0
    for first in firsts:
        scores = found[first : first + NUM_CHOICES]
        terms, number = pairs[first + scores.index(max(scores))].continuation.split(" = ")
        num_right += sum(map(int, terms.split(" + "))) == int(number)
    return num_right / len(firsts)


def summarize(engine: str, pairs: list[Pair], timing: Timing, reference: list[float]) -> dict[str, str | float]:
    """Return a line of the output: the times of 1,000 pairs, and the distances to our log-likelihoods."""
    factor = 1000 / len(timing.found)
    distances = [abs(a - b) for a, b in zip(timing.found, reference, strict=False)]
    return {
        "engine": engine,
        "measured": len(timing.found),
        "seconds": round(timing.seconds * factor, 2),
        "processor seconds": round(timing.processor * factor, 2),
        "right": round(count_right(pairs, timing.found), 3),
        "mean distance": round(sum(distances) / len(distances), 4),
        "largest": round(max(distances), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("file")
    add("--llama-cpp-python", required=True, metavar="PYTHON", help="an interpreter that has llama.cpp and its server")
    add("--ours", type=int, default=1000, metavar="N", help="pairs that this engine measures")
    add("--server", type=int, default=1000, metavar="N", help="pairs that the server measures; 0 leaves it out")
    add("--decode", type=int, default=1000, metavar="N", help="pairs that llama_decode measures; 0 leaves it out")
    add("--rounds", type=int, default=1)
    add("--threads", type=int, default=2)
    add("--dtype", default="auto", help="of this engine")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    print(f"{read_processor()[0]}, commit {commit()}, {args.threads} threads", flush=True)
    pairs = make_pairs(max(args.ours, args.server, args.decode))
    for _ in range(args.rounds):
        ours = time_ours(args.file, pairs[: args.ours], {"dtype": args.dtype})
        print(json.dumps(summarize("ours", pairs, ours, ours.found)), flush=True)
        for engine, measure, count in (("server", time_server, args.server), ("decode", time_decode, args.decode)):
            if count:
                timing = measure(args.file, pairs[:count], args.llama_cpp_python, args.threads)
                print(json.dumps(summarize(engine, pairs, timing, ours.found)), flush=True)


if __name__ == "__main__":
    main()
