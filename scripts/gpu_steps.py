"""Times decode steps of 1 to 512 sequences after 100 prompt tokens, and says what the host does meanwhile.

    python scripts/gpu_steps.py [--model qwen3-0.6b] [--quantization int8] [--kv-cache-dtype int8]
        [--few-rows-bytes 25165824]

Random weights. 15 steps come before those that are timed. A line has the time of a step, how long the device computed,
and what the host did. While the device computes a step, the host plans and launches the next one. Then it waits for the
first. With --few-rows-bytes, layers whose matrices have at most so many bytes multiply up to 32 rows by our own kernel,
and others by cuBLAS: 0 is cuBLAS alone.
"""

import argparse
import sys
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.backends.gpu.triton_backend import TritonKernels
from nanovllm.engine.plan import StepResult
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.utils.clock import Clock

PROMPT_LEN = 100
STEPS = 100
NUM_SEQS = (1, 2, 8, 32, 64, 128, 256, 512)


class Recorder:
    """Observes an engine, and adds up the seconds of the device and of what the host does."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.num_steps = 0
        self.device = 0.0
        self.host: defaultdict[str, float] = defaultdict(float)

    def planned(self, number: int, at: float, step: ScheduledStep) -> None:
        pass

    def finished(self, number: int, step: ScheduledStep, clock: Clock, result: StepResult) -> None:
        self.num_steps += 1
        self.device += result.device_seconds
        for name, _, seconds in clock.spans:
            self.host[name] += seconds

    def close(self) -> None:
        pass


def time_steps(llm: LLM, recorder: Recorder, num_seqs: int) -> float:
    """Return the seconds of a decode step."""
    params = SamplingParams(temperature=0.6, max_tokens=STEPS + 30, ignore_eos=True)
    for i in range(num_seqs):
        llm.engine.add(llm.prepare([(7 * i + j) % 1000 for j in range(PROMPT_LEN)], params))
    for _ in range(15):  # the prompts, and some decodes
        llm.engine.step()
    torch.cuda.synchronize()
    recorder.clear()
    start = time.perf_counter()
    for _ in range(STEPS):
        llm.engine.step()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    llm.engine.abort_all()
    return seconds / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--few-rows-bytes", type=int)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_steps.py measures a GPU, and there is no CUDA device here (torch.cuda.is_available())")
    options = vars(args).copy()
    TritonKernels.few_rows_bytes = options.pop("few_rows_bytes")
    options |= {"load_format": "dummy", "max_num_seqs": max(NUM_SEQS), "max_model_len": 512}
    recorder = Recorder()
    with LLM(**options) as llm:
        llm.observe(recorder)
        for num_seqs in NUM_SEQS:
            seconds = time_steps(llm, recorder, num_seqs)
            host = ", ".join(
                f"{name} {1e6 * spent / recorder.num_steps:.0f} us" for name, spent in recorder.host.items()
            )
            device = f"device {1e3 * recorder.device / recorder.num_steps:.3f} ms"
            print(
                f"{num_seqs:4} x {1e3 * seconds:.3f} ms, {num_seqs / seconds:,.0f} tok/s; {device}; {host}", flush=True
            )


if __name__ == "__main__":
    main()
