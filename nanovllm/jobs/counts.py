"""Counts the results of a job, for its progress bar, its summary and --stats."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from nanovllm.jobs.result_lines import Usage
from nanovllm.utils.progress import ProgressBar, tokens_a_step


@dataclass
class JobCounts:
    """The counts of a job.

    Attributes:
        num_lines: lines of the input; None if it is a pipe.
        num_earlier: results of earlier runs.
        num_succeeded, num_failed: results of all runs, without and with an error.
        num_prompt_tokens, num_cached_tokens, num_generated_tokens: tokens of this run's results.
        num_cut: this run's results that should fit a grammar, but reached their token limit first.
        num_draft_tokens, num_accepted_tokens: drafts of this run, if the engine is in this process.
        seconds: how long this run answered lines.
    """

    num_lines: int | None = None
    num_earlier: int = 0
    num_succeeded: int = 0
    num_failed: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_cut: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    seconds: float = 0.0
    _bar: ProgressBar | None = field(default=None, repr=False)

    def count(self, usage: Usage | None) -> None:
        """Count one result; usage is None if it is an error."""
        if usage is None:
            self.num_failed += 1
        else:
            self.num_succeeded += 1
            self.num_prompt_tokens += usage.num_prompt_tokens
            self.num_cached_tokens += usage.num_cached_tokens
            self.num_generated_tokens += usage.num_generated_tokens
            self.num_cut += usage.num_cut
        if self._bar is not None:
            self._bar.update()

    @contextmanager
    def show(self, stats: Callable[[], Mapping[str, int]]) -> Iterator[ProgressBar]:
        """Show a progress bar within the block, and yield it. Measure the seconds and count the drafts of the block.

        Args:
            stats: returns the engine's counts of tokens; see `LLM.stats`.
        """
        since = time.perf_counter()
        before = dict(stats())
        self._bar = ProgressBar(
            stats,
            desc="Answering",
            unit="line",
            total=self.num_lines,
            initial=self.num_earlier,
            mininterval=0.5 if sys.stderr.isatty() else 10.0,
        )
        try:
            yield self._bar
        finally:
            self._bar.close()
            self._bar = None
            now = stats()
            self.num_draft_tokens = now["num_draft_tokens"] - before["num_draft_tokens"]
            self.num_accepted_tokens = now["num_accepted_tokens"] - before["num_accepted_tokens"]
            self.seconds = time.perf_counter() - since

    @property
    def tokens_per_second(self) -> float:
        return self.num_generated_tokens / self.seconds if self.seconds else 0.0

    @property
    def cache_hit_rate(self) -> float:
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    @property
    def tokens_per_step(self) -> float:
        return tokens_a_step(self.num_generated_tokens, self.num_accepted_tokens)

    def describe(self) -> str:
        """Return the summary as text for people."""
        total = "" if self.num_lines is None else f" of {self.num_lines}"
        before = f", {self.num_earlier} of them by earlier runs" if self.num_earlier else ""
        summary = (
            f"{self.num_succeeded + self.num_failed}{total} lines answered{before}: "
            f"{self.num_succeeded} results, {self.num_failed} errors"
        )
        if self.num_cut:
            summary += f"; {self.num_cut} constrained outputs were cut at their token limit and may not parse"
        if not self.seconds:
            return summary
        drafts = ""
        if self.num_draft_tokens:
            share = self.num_accepted_tokens / self.num_draft_tokens
            drafts = (
                f"; {share:.1%} of {self.num_draft_tokens} drafts accepted, {self.tokens_per_step:.2f} tokens a step"
            )
        return (
            f"{summary}\n"
            f"{self.num_prompt_tokens} prompt tokens, {self.cache_hit_rate:.1%} of them from the prefix cache; "
            f"{self.num_generated_tokens} generated in {self.seconds:.1f} s, {self.tokens_per_second:.0f} tok/s{drafts}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the summary for programs; shares are rounded to 4 digits."""
        counts = {name: value for name, value in asdict(self).items() if not name.startswith("_")}
        rates = {
            "tokens_per_second": self.tokens_per_second,
            "cache_hit_rate": self.cache_hit_rate,
            "tokens_per_step": self.tokens_per_step,
        }
        return {**counts, **{name: round(value, 4) for name, value in rates.items()}}
