"""The bar that a run shows."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from tqdm import tqdm


def tokens_a_step(num_generated: int, num_accepted: int) -> float:
    """Tokens that a step brought a sequence: one, and the drafts that it confirmed."""
    return num_generated / max(num_generated - num_accepted, 1)


class ProgressBar(tqdm):  # type: ignore[misc]  # tqdm has no types
    """A bar with the tokens per second beside it, and the part of the KV cache in use where that is known.

    As an observer of an engine it is drawn after every step, if its last drawing was long enough ago.
    """

    __eq__, __hash__ = object.__eq__, object.__hash__  # tqdm's compare bars by their place on the screen

    MININTERVAL = 0.1
    """Seconds between two drawings at least."""

    def __init__(self, stats: Callable[[], Mapping[str, int]], **options: Any) -> None:
        """
        Args:
            stats: counts as `LLM.stats` gives them; asked for only when the bar is drawn.
            options: tqdm's.
        """
        self._stats, self._before, self._since = stats, dict(stats()), time.perf_counter()
        super().__init__(**{"mininterval": self.MININTERVAL, "dynamic_ncols": True, "miniters": 0, **options})

    def display(self, *arguments: Any, **options: Any) -> None:
        with suppress(OSError):  # a log on a full disk must not end the run
            super().display(*arguments, **options)

    def close(self) -> None:
        with suppress(OSError):
            super().close()

    @property
    def format_dict(self) -> dict[str, Any]:
        now, seconds = self._stats(), max(time.perf_counter() - self._since, 1e-9)
        prompt, cached, generated, accepted = (
            now[name] - self._before[name]
            for name in ("num_prompt_tokens", "num_cached_tokens", "num_generated_tokens", "num_accepted_tokens")
        )
        text = f"prefill={(prompt - cached) / seconds:.0f} tok/s, decode={generated / seconds:.0f} tok/s"
        if accepted:
            text += f", {tokens_a_step(generated, accepted):.2f} tok/step"
        if "num_blocks" in now:
            text += f", kv={1 - now['num_free_blocks'] / now['num_blocks']:.0%}"
        return {**super().format_dict, "postfix": text}

    def planned(self, *_: object) -> None:
        """A step was planned."""

    def finished(self, *_: object) -> None:
        """A step was read."""
        self.update(0)
