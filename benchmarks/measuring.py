"""The record of a measured run: its steps, and the commit that it was made at."""

import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.bench_cost import Step
from nanovllm.engine.plan import StepResult
from nanovllm.engine.step import ScheduledStep
from nanovllm.ops.step_inputs import StepInputs
from nanovllm.utils.clock import Clock


class Recorder:
    """Observes an engine. It keeps the work of each step, and the seconds on the device and on the host."""

    def __init__(self, device: torch.device) -> None:
        self._launch_computes = device.type == "cpu"
        self.steps: list[Step] = []
        self.device_seconds: list[float] = []
        self.host_seconds: list[float] = []
        self.command_seconds = 0.0

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

    def time_commands(self, llm: Any) -> None:
        """From now on, count in command_seconds how long rank 0 of several takes to send plans to the others."""
        followers = llm.engine.runner._followers
        send = followers.send

        def send_timed(message: Any) -> None:
            since = time.perf_counter()
            send(message)
            self.command_seconds += time.perf_counter() - since

        followers.send = send_timed


def make_inputs(num_seqs: int, query_len: int, seq_len: int, block_tables: Tensor) -> StepInputs:
    """Return the inputs of a step of num_seqs equal sequences, of which nothing is stored."""
    device = block_tables.device
    num_tokens = num_seqs * query_len
    return StepInputs(
        token_ids=torch.zeros(num_tokens, dtype=torch.int32, device=device),
        positions=torch.zeros(num_tokens, dtype=torch.int32, device=device),
        slots=torch.full((num_tokens,), -1, device=device),
        cu_seqlens=torch.arange(0, num_tokens + 1, query_len, dtype=torch.int32, device=device),
        seq_lens=torch.full((num_seqs,), seq_len, dtype=torch.int32, device=device),
        block_tables=block_tables,
        rows=torch.arange(num_seqs, dtype=torch.int32, device=device),
        num_decodes=num_seqs if query_len == 1 else 0,
        query_lens_cpu=np.full(num_seqs, query_len, np.int32),
        seq_lens_cpu=np.full(num_seqs, seq_len, np.int32),
    )


def commit() -> str:
    """Return the commit that is measured: "unknown" without git, or on a machine that only got the files."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parents[1]), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
