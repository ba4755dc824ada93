"""Counts the results of a job, for its progress bar, its summary and --stats."""

import re
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from nanovllm.apps.jobs.result_lines import ResultLine
from nanovllm.utils.progress import ProgressBar, tokens_a_step

_VALUES = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")
"""The parts of an error's message that differ from line to line."""
MAX_KINDS = 20
"""So many kinds of errors are counted, each by itself."""
OTHER_KINDS = "others"
"""Stands for all further ones."""


@dataclass
class JobCounts:
    """The counts of a job.

    Attributes:
        num_lines: how many lines the input has; None if it is a pipe.
        num_earlier: how many results earlier runs gave.
        num_succeeded, num_failed: how many results all runs gave, without and with an error.
        num_prompt_tokens, num_cached_tokens, num_generated_tokens: the tokens of this run's results.
        num_copied: how many of this run's results are copies of the answer of an equal request.
        num_cut: how many of this run's results should fit a grammar, but reached their token limit first.
        num_draft_tokens, num_accepted_tokens: the drafts of this run, if the engine is in this process.
        load_seconds, seconds: how long this run loaded the model, and answered lines.
        errors: for each kind of error in this run (the message without its values), its code, its count, and the
            message of the first.
    """

    num_lines: int | None = None
    num_earlier: int = 0
    num_succeeded: int = 0
    num_failed: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_copied: int = 0
    num_cut: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    load_seconds: float = 0.0
    seconds: float = 0.0
    errors: dict[str, dict[str, Any]] = field(default_factory=dict)
    _bar: ProgressBar | None = field(default=None, repr=False)

    def count(self, result: ResultLine) -> None:
        """Count one result."""
        usage = result.usage
        if result.error is not None:
            self.num_failed += 1
            code, message = result.error
            kind = _VALUES.sub("", message)
            if kind not in self.errors and len(self.errors) >= MAX_KINDS:
                kind = OTHER_KINDS
            self.errors.setdefault(kind, {"code": code, "count": 0, "first": message})["count"] += 1
        if usage is not None:
            self.num_succeeded += 1
            self.num_prompt_tokens += usage.num_prompt_tokens
            self.num_cached_tokens += usage.num_cached_tokens
            self.num_generated_tokens += usage.num_generated_tokens
            self.num_cut += usage.num_cut
            self.num_copied += result.is_copy

    def advance(self) -> None:
        """Move the progress bar on by a line, which has ended. It may be counted later, when its result is written."""
        if self._bar is not None:
            self._bar.update()

    @contextmanager
    def show(self, stats: Callable[[], Mapping[str, int]]) -> Iterator[ProgressBar]:
        """Show a progress bar within the block, and yield it. Measure the seconds of the block.

        Args:
            stats: returns the counts of an engine that has done nothing before; see `LLM.stats`.
        """
        since = time.perf_counter()
        self._bar = ProgressBar(
            lambda: {**stats(), "num_copied": self.num_copied},
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
            self.num_draft_tokens = stats()["num_draft_tokens"]
            self.num_accepted_tokens = stats()["num_accepted_tokens"]
            self.seconds = time.perf_counter() - since

    def describe(self) -> str:
        """Return the summary as text for people."""
        total = "" if self.num_lines is None else f" of {self.num_lines}"
        before = f", {self.num_earlier} of them by earlier runs" if self.num_earlier else ""
        summary = (
            f"{self.num_succeeded + self.num_failed}{total} lines answered{before}: "
            f"{self.num_succeeded} results, {self.num_failed} errors"
        )
        if self.num_copied:
            summary += f"; {self.num_copied} are copies of the answer of an equal request"
        if self.num_cut:
            summary += f"; {self.num_cut} constrained outputs were cut at their token limit and may not parse"
        for error in self.errors.values():
            summary += f"\n{error['count']} x {error['code']}, the first: {error['first']}"
        if not self.seconds:
            return summary
        rates = self._compute_rates()
        summary += (
            f"\n{self.num_prompt_tokens} prompt tokens, {rates['cache_hit_rate']:.1%} of them from the prefix cache; "
            f"{self.num_generated_tokens} generated in {self.seconds:.1f} s, {rates['tokens_per_second']:.0f} tok/s"
        )
        if self.num_draft_tokens:
            share = self.num_accepted_tokens / self.num_draft_tokens
            summary += f"; {share:.1%} of {self.num_draft_tokens} drafts accepted"
            summary += f", {rates['tokens_per_step']:.2f} tokens a step"
        return summary

    def as_dict(self) -> dict[str, Any]:
        """Return the summary for programs; shares are rounded to 4 digits."""
        counts = {name: value for name, value in asdict(self).items() if not name.startswith("_")}
        counts["errors"] = [*self.errors.values()]
        unit = 1 if sys.platform == "darwin" else 1024  # Linux tells KiB
        counts["peak_memory_bytes"] = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {**counts, **{name: round(value, 4) for name, value in self._compute_rates().items()}}

    def _compute_rates(self) -> dict[str, float]:
        rate = self.num_generated_tokens / self.seconds if self.seconds else 0.0
        return {
            "tokens_per_second": rate,
            "tokens_per_hour": 3600 * rate,
            "cache_hit_rate": self.num_cached_tokens / max(self.num_prompt_tokens, 1),
            "tokens_per_step": tokens_a_step(self.num_generated_tokens, self.num_accepted_tokens),
        }
