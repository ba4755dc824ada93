"""Measures how long steps take on this machine, and chooses how many drafts are worth verifying at that price."""

import logging
import time
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nanovllm.config import ResolvedConfig
from nanovllm.engine.interfaces import Handle
from nanovllm.engine.plan import IntArray, StepPlan
from nanovllm.utils.integers import ceil_div

logger = logging.getLogger(__name__)

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Tokens of the steps that are measured. Costs jump among few tokens, where a kernel's tiles end."""
ROUND = 0.01
"""Seconds for which a step is repeated in one round of measuring; it runs at least once."""
LONG = 0.2
"""A step that takes so many seconds is measured in one round, not in two, and with drafts alone."""
WORTHWHILE = 1.02
"""Drafts are verified only if they are expected to make so many times the tokens a second of a step without them."""

Float64Array = NDArray[np.float64]


class PlanRunner(Protocol):
    """Runs plans on the device: the runner of the model, or that of the draft model."""

    def launch(self, plan: StepPlan) -> Handle:
        """Start a step and return at once."""


@dataclass(frozen=True)
class StepCosts:
    """Seconds of steps, by the number of tokens that a step computes.

    Attributes:
        num_tokens: ascending, the sizes that were measured.
        plain: seconds of a step of each size, without drafts. It may run as a CUDA graph or a recorded step.
        verified: seconds of a step of each size, with drafts.
        drafting: seconds of a pass of the draft model over as many sequences; 0 if there is none.
    """

    num_tokens: Float64Array
    plain: Float64Array
    verified: Float64Array
    drafting: Float64Array

    def interpolate(self, num_tokens: NDArray[np.integer[Any]], seconds: Float64Array) -> Float64Array:
        """Return the seconds of steps of any size, given one of the attributes `plain`, `verified` or `drafting`.

        Between the measured sizes they lie on straight lines; beyond the last one seconds are proportional to tokens.
        """
        beyond = np.maximum(num_tokens / self.num_tokens[-1], 1.0)
        return np.interp(num_tokens, self.num_tokens, seconds) * beyond  # type: ignore[no-any-return]


def choose_num_drafts(
    offers: IntArray, rates: Float64Array, num_seqs: int, num_tokens: int, costs: StepCosts
) -> IntArray:
    """Choose how many drafts of each sequence to verify, so that the step makes the most tokens a second.

    The j-th draft of a sequence is kept with a probability of rate^j. The drafts are sorted by that; the step takes as
    many of them, from the likeliest on, as pay.

    Args:
        offers: int32 [n], how many drafts there are for each sequence.
        rates: [n], the probability that a draft is right if those before it are.
        num_seqs: sequences that get a token in this step anyway.
        num_tokens: tokens that the step computes anyway.

    Returns:
        int32 [n], how many drafts of each sequence to verify.
    """
    most = int(offers.max(initial=0))
    if not most:
        return np.zeros_like(offers)
    depths = np.arange(1, most + 1)  # the first draft of a sequence has depth 1
    gains = np.where(depths <= offers[:, None], rates[:, None] ** depths, 0.0).ravel()
    order = np.argsort(-gains, kind="stable")[: int(offers.sum())]
    # Element i of these is for a step with the i likeliest drafts.
    tokens_made = num_seqs + np.concatenate(([0.0], gains[order].cumsum()))
    # The draft model's first pass is due in any step, and makes the drafts of depth 1; each further depth is a pass.
    passes = np.maximum.accumulate(np.concatenate(([1], order % most + 1)))
    sizes = num_tokens + np.arange(len(tokens_made))
    pass_seconds = costs.interpolate(np.array([num_seqs]), costs.drafting)
    seconds = costs.interpolate(sizes, costs.verified) + passes * pass_seconds
    without = sizes[:1]
    seconds[0] += (costs.interpolate(without, costs.plain) - costs.interpolate(without, costs.verified))[0]
    pace = tokens_made / seconds
    best = int(pace.argmax())
    if pace[best] < WORTHWHILE * pace[0]:
        best = 0
    return np.bincount(order[:best] // most, minlength=len(offers)).astype(np.int32)


def measure_costs(
    runner: PlanRunner, config: ResolvedConfig, max_drafts: int, draft_runner: PlanRunner | None = None
) -> StepCosts:
    """Run steps of several sizes, with and without drafts, and return their times.

    Args:
        runner: the runner of the model, with its cache; nothing is stored there.
        max_drafts: the most drafts of a sequence in a step.
        draft_runner: the runner of the draft model; None if there is none.
    """
    limit = min(config.max_num_batched_tokens, config.max_num_seqs * (1 + max_drafts))
    sizes = [size for size in SIZES if size <= limit]
    decodes = [min(size, config.max_num_seqs) for size in sizes]
    verified = time_steps(runner, config, sizes, max_drafts)
    plain = verified.copy()
    num_short = int(np.searchsorted(verified, LONG))  # to repeat a longer step makes it hardly faster
    if num_short and not config.enforce_eager:
        plain[:num_short] = time_steps(runner, config, decodes[:num_short], 0)
    drafting = np.zeros(len(sizes))
    if draft_runner is not None:
        drafting = time_steps(draft_runner, config, decodes, 0)
    logger.info("a step of %s tokens takes %s ms", sizes, np.round(1000 * verified, 2).tolist())
    return StepCosts(np.array(sizes, np.float64), plain, verified, drafting)


def time_steps(runner: PlanRunner, config: ResolvedConfig, sizes: list[int], num_drafts: int) -> Float64Array:
    """Return the seconds of steps of given sizes, each the best of several runs.

    There are two rounds, because another process may disturb one. More tokens never count as cheaper than fewer.

    Args:
        sizes: how many tokens each step computes.
        num_drafts: how many drafts each sequence has; so a step has size / (1 + num_drafts) sequences.
    """
    times = dict.fromkeys(sizes, np.inf)

    def measure(size: int) -> None:
        plan = StepPlan.largest(ceil_div(size, 1 + num_drafts), size, 1 + num_drafts, num_drafts)
        plan.rows[:] = config.max_num_seqs  # the padding row: nothing is stored
        spent = 0.0
        while spent < ROUND:
            since = time.perf_counter()
            runner.launch(plan).result()
            seconds = time.perf_counter() - since
            times[size] = min(times[size], seconds)
            spent += seconds

    for size in (sizes[0], *sizes):  # the first one warms up
        measure(size)
    for size in sizes:
        if times[size] < LONG:
            measure(size)
    return np.minimum.accumulate([times[size] for size in reversed(sizes)])[::-1]
