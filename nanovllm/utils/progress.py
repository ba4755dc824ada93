"""The progress bar of a run."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from tqdm import tqdm


def hide_unless(show: bool) -> dict[str, bool]:
    """Return the options of tqdm that hide a bar unless `show`.

    A bar that is shown gets no option, because tqdm reads TQDM_DISABLE only where `disable` is not given.
    """
    return {} if show else {"disable": True}


def tokens_a_step(num_generated: int, num_accepted: int) -> float:
    """Return the mean number of tokens that a step gave a sequence: one, and the drafts that it accepted."""
    return num_generated / max(num_generated - num_accepted, 1)


class ProgressBar(tqdm):  # type: ignore[misc]  # tqdm has no types
    """A progress bar with the tokens per second, and the share of the KV cache that is in use.

    It is an observer of the engine: after a step it is drawn anew if the last drawing was long enough ago.
    """

    # tqdm compares bars by their place on the screen, and cannot compare one with another kind of observer.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(self, stats: Callable[[], Mapping[str, int]], **options: Any) -> None:
        """
        Args:
            stats: returns counts as `LLM.stats` does; called only when the bar is drawn.
            options: tqdm's; of them `mininterval` is the least time between two drawings, by default 0.1 seconds.
        """
        self._stats = stats
        self._before = dict(stats())
        self._num_before = options.get("initial", 0)
        self._num_running = 0
        self._since = time.perf_counter()
        super().__init__(dynamic_ncols=True, miniters=0, **options)

    def display(self, *arguments: Any, **options: Any) -> None:
        with suppress(OSError):  # a log on a full disk must not end the run
            super().display(*arguments, **options)

    def close(self) -> None:
        with suppress(OSError):
            super().close()

    @property
    def format_dict(self) -> dict[str, Any]:
        now = self._stats()
        seconds = max(time.perf_counter() - self._since, 1e-9)
        prompt, cached, generated, accepted = (
            now[name] - self._before[name]
            for name in ("num_prompt_tokens", "num_cached_tokens", "num_generated_tokens", "num_accepted_tokens")
        )
        text = f"prefill={(prompt - cached) / seconds:.0f} tok/s, decode={generated / seconds:.0f} tok/s"
        if accepted:
            text += f", {tokens_a_step(generated, accepted):.2f} tok/step"
        if now.get("num_copied"):
            text += f", {now['num_copied']} copied"
        if "num_blocks" in now:
            text += f", kv={1 - now['num_free_blocks'] / now['num_blocks']:.0%}"
        if self._num_running and self.n == self._num_before:
            text = f"{self._num_running} running, none has ended yet, {text}"
        return {**super().format_dict, "postfix": text}

    def planned(self, *_: object) -> None:
        """Do nothing when a step was planned."""

    def finished(self, number: int, step: Any, *_: object) -> None:
        """Draw the bar, if it is time, after a step was read. `step` is its ScheduledStep."""
        self._num_running = len(step.seqs)
        self.update(0)
