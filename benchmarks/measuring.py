"""Helps benchmarks: the inputs of a step, and the commit that is measured."""

import subprocess
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nanovllm.ops.step_inputs import StepInputs


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
