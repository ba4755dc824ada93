"""Speculation as an engine's options ask for it, with what steps cost on this machine."""

import logging
import time
from dataclasses import replace

import numpy as np

from nanovllm.config import ResolvedConfig
from nanovllm.drafts.draft_model import ModelDrafter
from nanovllm.drafts.ngrams import NgramDrafter
from nanovllm.drafts.speculation import Drafter, FloatArray, RowCosts, Speculation
from nanovllm.engine.hooks import Runner
from nanovllm.engine.plan import StepPlan
from nanovllm.engine.scheduler import Scheduler

logger = logging.getLogger(__name__)

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Rows of the steps that are measured: among few rows costs jump, where a kernel's tiles end."""
ROUND, LONG = 0.01, 0.2
"""Seconds for which each is run in a round, at least once, and of a step that is not run in the second one."""


def start_speculation(config: ResolvedConfig, runner: Runner, scheduler: Scheduler, vocab_size: int) -> Speculation:
    """Measure what steps cost, and make what guesses."""
    options = config.speculative_config or {}
    most = min(config.num_speculative_tokens, config.max_model_len - 1)
    drafter: Drafter
    if config.draft is None:
        drafter = NgramDrafter(options["prompt_lookup_min"], options["prompt_lookup_max"])
    else:
        drafter = ModelDrafter(runner, config.max_num_seqs, vocab_size, config.draft["vocab_size"])
    limit = min(config.max_num_batched_tokens, config.max_num_seqs * (1 + most))
    rows = [size for size in SIZES if size <= limit]
    decodes = [min(size, config.max_num_seqs) for size in rows]
    verified = _time_steps(runner, config, rows, most)
    plain = _time_steps(runner, config, decodes, 0) if config.use_graphs else verified
    drafting = (
        np.zeros(len(rows)) if config.draft is None else _time_steps(runner, config, decodes, 0, for_draft_model=True)
    )
    logger.info("a step of %s rows takes %s ms", rows, np.round(1000 * verified, 2).tolist())
    return Speculation(scheduler, drafter, most, RowCosts(np.array(rows, np.float64), plain, verified, drafting))


def _time_steps(
    runner: Runner, config: ResolvedConfig, sizes: list[int], num_drafts: int, for_draft_model: bool = False
) -> FloatArray:
    """Seconds of steps that compute so many rows, of sequences that verify num_drafts each: the best of some runs.

    Two rounds, for a neighbour may disturb the steps of one; and more rows never count as cheaper than fewer.
    """
    times = dict.fromkeys(sizes, np.inf)

    def measure(size: int) -> None:
        plan = StepPlan.largest(-(-size // (1 + num_drafts)), size, 1 + num_drafts, num_drafts)
        plan.rows[:] = config.max_num_seqs  # the row of nobody: nothing is stored
        plan, spent = replace(plan, for_draft_model=for_draft_model), 0.0
        while spent < ROUND:
            since = time.perf_counter()
            runner.launch(plan).result()
            seconds = time.perf_counter() - since
            times[size], spent = min(times[size], seconds), spent + seconds

    for size in (sizes[0], *sizes):  # the first one warms up
        measure(size)
    for size in sizes:
        if times[size] < LONG:
            measure(size)
    return np.minimum.accumulate([times[size] for size in reversed(sizes)])[::-1]
