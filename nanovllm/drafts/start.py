"""Speculation as an engine's options ask for it, with what steps cost on this machine."""

import logging
import time

import numpy as np

from nanovllm.config import ResolvedConfig
from nanovllm.drafts.ngrams import NgramDrafter
from nanovllm.drafts.speculation import FloatArray, RowCosts, Speculation
from nanovllm.engine.llm_engine import Runner
from nanovllm.engine.plan import StepPlan

logger = logging.getLogger(__name__)

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Rows of the steps that are measured: among few rows costs jump, where a kernel's tiles end."""


def start_speculation(config: ResolvedConfig, runner: Runner) -> Speculation:
    """Measure what steps cost, and make what guesses."""
    options = config.speculative_config or {}
    if options["method"] == "draft_model":
        raise ValueError('speculative_config: method "draft_model" cannot be had yet; use "ngram"')
    most = min(config.num_speculative_tokens, config.max_model_len - 1)
    drafter = NgramDrafter(options["prompt_lookup_min"], options["prompt_lookup_max"])
    limit = min(config.max_num_batched_tokens, config.max_num_seqs * (1 + most))
    rows = np.array([size for size in SIZES if size <= limit])
    verified = _time_steps(runner, config, rows, most)
    plain = _time_steps(runner, config, rows, 0) if config.use_graphs else verified
    costs = RowCosts(rows.astype(np.float64), plain, verified, np.zeros(len(rows)))
    logger.info("a step of %s rows takes %s ms", rows.tolist(), np.round(1000 * verified, 2).tolist())
    return Speculation(drafter, most, costs)


def _time_steps(
    runner: Runner, config: ResolvedConfig, sizes: "np.ndarray[tuple[int], np.dtype[np.int64]]", num_drafts: int
) -> FloatArray:
    """Seconds of steps that compute so many rows, of sequences that verify num_drafts each: the best of some runs."""
    times = []
    for size in [sizes[0], *sizes]:
        plan = StepPlan.largest(-(-size // (1 + num_drafts)), size, 1 + num_drafts, num_drafts)
        plan.rows[:] = config.max_num_seqs  # the row of nobody: nothing is stored
        best, spent = np.inf, 0.0
        while spent < 0.05 or spent < 3 * best < 0.5:
            since = time.perf_counter()
            runner.launch(plan).result()
            best, spent = min(best, time.perf_counter() - since), spent + time.perf_counter() - since
        times.append(best)
    return np.array(times[1:])
