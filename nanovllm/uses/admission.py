"""The order in which requests that are known in advance are admitted.

If the KV cache cannot hold all prefixes that requests share, the requests with one prefix run one after another. And a
batch ends sooner if its longest requests do not begin last. The order is decided before the engine gets a request.
Numbers and seeds are fixed before that, in the given order, so each request gets the same tokens in any order.
"""

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from nanovllm.config import ResolvedConfig
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.sequence import Request, Sequence
from nanovllm.utils.integers import ceil_div

T = TypeVar("T")

FIRST_LINES = 4
"""A job begins when FIRST_LINES x max_num_seqs lines are prepared, or all; with replicas, so many for each."""
LINES_AHEAD = 16
"""At most LINES_AHEAD x max_num_seqs lines are prepared, and not yet handed to the engine; with replicas, so many for
each."""
TOKENS_AHEAD = 4 << 20
"""No further line is prepared while the prompts of those lines have this many tokens."""


@dataclass(slots=True, eq=False)
class Candidate:
    """A request, or a line of a job, that is not yet handed to the engine.

    Attributes:
        line: what the caller knows it by, and its requests.
        number: its position in the given order.
        prompt: the token ids of the prompt, 4 bytes each.
        max_tokens: the most tokens of its output.
        mean: if max_tokens is the same for all, the mean length of the outputs of requests that have ended and whose
            prompts begin with the same block, or of all that have ended; 0 if none has.
        group: candidates of a lower group come first.
        is_late: its group is sorted by length.
        reason: what the group has in common; "" if nothing.
    """

    line: tuple[Any, list[Request]]
    number: int
    prompt: bytes
    max_tokens: int
    mean: float = 0.0
    group: int = 0
    is_late: bool = False
    reason: str = ""

    @property
    def length(self) -> float:
        """How long its output may become, as far as that is known."""
        return self.mean or self.max_tokens

    @property
    def place(self) -> tuple[int, bool, float, int]:
        """Sorts candidates: by group; the late ones by length, the longest first; then in the given order."""
        return self.group, self.is_late, -self.length if self.is_late else 0, self.number

    def describe(self) -> str:
        """Say why its turn came, for the trace."""
        if not self.is_late:
            return f"in turn{self.reason}"
        guess = f"{self.mean:.0f} tokens on average" if self.mean else f"max_tokens {self.max_tokens}"
        return f"longest first{self.reason}: {guess}"


def sort_candidates(candidates: list[Candidate], num_rows: int) -> list[Candidate]:
    """Return candidates in their order. The last ones become late.

    Their outputs together are at most as long as the longest output for each row, so that one cannot begin too late.
    To sort all by length would be slower: short outputs would come together, and steps compute more prompts than they
    can beside the outputs without taking longer. If nothing tells their lengths apart, none becomes late.

    Args:
        num_rows: how many run at a time; 0 if none is late, for example because more candidates will follow.
    """
    ordered = sorted(candidates, key=lambda one: (one.group, one.number))
    lengths = {one.length for one in candidates}
    most_work = num_rows * max(lengths) if len(lengths) > 1 else 0
    work = 0.0
    for one in reversed(ordered):
        work += one.length
        one.is_late = work <= most_work and most_work > 0
    return sorted(ordered, key=lambda one: one.place)


def form_groups(candidates: list[Candidate], config: ResolvedConfig, num_blocks: int, last: bytes = b"") -> None:
    """Set the group of each candidate.

    All are one group if the pool keeps every prefix that they share. Otherwise they are divided by the first block in
    which they differ, and each part is treated likewise. First comes the part of the prompt `last`, whose prefix is in
    the cache; then the largest part; of equal ones the one with the longest output.

    Args:
        num_blocks: how many blocks the pool has.
        last: the prompt of the candidate whose turn came before.
    """
    block_bytes = 4 * config.block_size
    candidates = sorted(candidates, key=lambda one: one.prompt)
    common = count_common_blocks([one.prompt for one in candidates], block_bytes)
    if not config.enable_prefix_caching:
        common[:] = 0
    lengths = (len(one.prompt) // 4 + round(one.length) for one in candidates)
    needed = np.array([ceil_div(min(length, config.max_model_len), config.block_size) for length in lengths])
    parts = [(0, len(candidates), (0, 0))]
    group = 0
    before = None
    while parts:
        start, end, parent = parts.pop()
        inside = common[start + 1 : end]
        depth = int(inside.min()) if len(inside) else 0
        if keeps_prefixes(needed[start:end] - depth, inside - depth, config.max_num_seqs, num_blocks - depth):
            single = parent if end - start == 1 else None
            group += single is None or single != before  # those that share nothing more are one group
            before = single
            for one in candidates[start:end]:
                one.group = group
                one.reason = f", among {end - start} that share {depth} blocks" if depth else ""
            continue
        bounds = [start, *(start + 1 + np.flatnonzero(inside == depth)).tolist(), end]
        size = (depth + 1) * block_bytes
        order = []
        for first, after in pairwise(bounds):
            is_next = candidates[first].prompt[:size] == last[:size]
            longest = max(one.length for one in candidates[first:after]) if after - first > 1 else 0
            order.append((is_next, after - first, longest, -candidates[first].number, first, after))
        parts += [(first, after, (start, end)) for *_, first, after in sorted(order)]  # the last one is the next


def count_common_blocks(prompts: list[bytes], block_bytes: int) -> NDArray[np.int64]:
    """Return how many whole blocks each prompt shares with the one before it; 0 for the first."""
    counts = np.zeros(len(prompts), np.int64)
    for i in range(1, len(prompts)):
        before = prompts[i - 1]
        end = block_bytes
        while end <= len(before) and prompts[i].startswith(before[end - block_bytes : end], end - block_bytes):
            end += block_bytes
        counts[i] = end // block_bytes - 1
    return counts


def keeps_prefixes(needed: NDArray[np.int64], common: NDArray[np.int64], max_num_seqs: int, num_blocks: int) -> bool:
    """Return whether a pool keeps the shared prefixes of some prompts, in any order of them.

    Blocks of sequences that have ended may evict a prefix before its next use. So beside all prefixes there must be
    room for what runs at a time, and for one more sequence per prefix.

    Args:
        needed: the blocks that each sequence needs. The prompts are sorted.
        common: for each prompt but the first, the blocks that it shares with the one before it.
    """
    shared = np.maximum(np.diff(common, prepend=0), 0)  # the sum of `common` would count a block for each of its users
    num_own = needed.sum() - common.sum() - shared.sum()
    num_between = min(max_num_seqs + np.count_nonzero(shared), len(needed))
    return not shared.any() or bool(shared.sum() + num_between * num_own / len(needed) <= num_blocks)


class Admission:
    """Reorders requests on their way to the engine."""

    def __init__(
        self, engine: LLMEngine, is_list: bool = False, find_key: Callable[[Any], object] = lambda line: None
    ) -> None:
        """
        Args:
            is_list: all requests are there. Otherwise they are read ahead, as far as there is room.
            find_key: tells the adapter of what the caller knows a line by. Lines with one key come together, those with
                the key None first.
        """
        self._find_key = find_key
        self._key: object = None
        """The key of the candidate whose turn came last."""
        self._config = engine.config
        self._num_rows = engine.config.max_num_seqs * engine.config.data_parallel_size
        """How many sequences run at a time; with replicas, in all of them."""
        self._num_blocks = engine.scheduler.block_manager.num_blocks
        """The blocks of one pool. Each replica has one."""
        self._has_all = is_list
        self._new: list[Candidate] = []
        """Candidates that came since the last sorting."""
        self._sorted: list[Candidate] = []
        """The others. The last one is the next."""
        self._num_read = 0
        self._num_bytes = 0
        """The bytes of the prompts of all candidates."""
        self._last = b""
        """The prompt of the candidate whose turn came last."""
        self._lengths = defaultdict[bytes, list[int]](list)
        """The lengths of outputs by the first block of the prompt, and of all outputs by b""."""
        self._sort_at = 0
        """All are sorted anew when so many requests have come or ended."""

    @property
    def need_not_wait(self) -> bool:
        """Whether a job can go on without its next line."""
        return bool(self._new or self._sorted) and self._num_read >= FIRST_LINES * self._num_rows

    def learn(self, prompt_token_ids: list[int], num_tokens: int) -> None:
        """Note that a request has ended, and how many tokens its output has."""
        self._lengths[array("i", prompt_token_ids[: self._config.block_size]).tobytes()].append(num_tokens)
        self._lengths[b""].append(num_tokens)

    def reorder(self, lines: Iterable[tuple[T, list[Request]] | None]) -> Iterator[tuple[T, list[Request]]]:
        """Yield lines, each with its requests, in the order in which the engine should get them.

        Args:
            lines: None says that the next line is not ready.
        """
        for line in lines:
            if line is not None:
                self._add(line)
            elif self.need_not_wait:
                yield self._take()
            while not self._has_all and self._is_full():
                yield self._take()
        self._has_all = True
        self._sort_at = 0
        while self._new or self._sorted:
            yield self._take()

    def _is_full(self) -> bool:
        num_lines = len(self._new) + len(self._sorted)
        return num_lines >= LINES_AHEAD * self._num_rows or self._num_bytes >= 4 * TOKENS_AHEAD

    def _add(self, line: tuple[Any, list[Request]]) -> None:
        longest = max(line[1], key=lambda request: len(request.prompt_token_ids))
        max_tokens = longest.params.max_tokens
        prompt = array("i", longest.prompt_token_ids).tobytes()
        limit = self._config.max_model_len if max_tokens is None else max_tokens
        self._new.append(Candidate(line, self._num_read, prompt, limit))
        self._num_read += 1
        self._num_bytes += len(prompt)

    def _take(self) -> tuple[Any, list[Request]]:
        if not self._sorted or self._num_read + len(self._lengths[b""]) >= self._sort_at:
            self._sort()
        one = self._sorted.pop()
        self._num_bytes -= len(one.prompt)
        self._last = one.prompt
        item, requests = one.line
        self._key = self._find_key(item)
        return item, [replace(request, reason=one.describe()) for request in requests]

    def _sort(self) -> None:
        candidates = self._sorted + self._new
        means: dict[bytes, float] = {}
        if self._lengths[b""] and len({one.max_tokens for one in candidates}) == 1:
            means = {key: sum(lengths) / len(lengths) for key, lengths in self._lengths.items()}
        for one in candidates:
            one.mean = means.get(one.prompt[: 4 * self._config.block_size], means.get(b"", 0.0))
        by_key: dict[object, list[Candidate]] = {self._key: []}  # the adapter that is in use comes first
        for one in sorted(candidates, key=lambda one: one.number):
            by_key.setdefault(self._find_key(one.line[0]), []).append(one)
        ordered: list[Candidate] = []
        for members in filter(None, by_key.values()):
            if self._new:
                form_groups(members, self._config, self._num_blocks, self._last)
            ordered += sort_candidates(members, self._count_rows(members) if self._has_all else 0)
        self._new = []
        self._sorted = ordered[::-1]
        num_events = self._num_read + len(self._lengths[b""])
        self._sort_at = num_events + max(len(candidates) // 2, self._num_rows)

    def _count_rows(self, candidates: list[Candidate]) -> int:
        """Return how many candidates run at a time; 0 if the pools cannot hold so many of the longest.

        Side by side some of these would be preempted, and computed again.
        """
        num_rows = min(self._num_rows, len(candidates))
        num_slots = self._num_blocks * self._config.block_size * self._config.data_parallel_size
        num_tokens = sorted(len(one.prompt) // 4 + one.length for one in candidates)
        return num_rows if sum(num_tokens[-num_rows:]) <= num_slots else 0


def put_in_order(
    engine: LLMEngine,
    requests: list[Request],
    find_key: Callable[[Any], object] = lambda number: None,
    change: Callable[[int], Iterable[None]] = lambda number: (),
) -> tuple[Iterator[Request | None], Callable[[int, Sequence], int]]:
    """Return requests for `LLMEngine.run` in the order that ends soonest, and a function to call as each one ends.

    With order="given" they are only grouped by their keys.

    Args:
        find_key: takes a request's number in the given order: see `Admission`.
        change: is called before each request. It yields None until the request may run.

    Returns:
        The function takes the number that the run gave to the request, and returns its number in the given order.
    """
    admission = Admission(engine, True, find_key)
    taken: list[int] = []

    def fix_numbers() -> Iterator[tuple[int, list[Request]]]:
        for number, request in enumerate(requests):
            yield number, [replace(request, numbers=engine.next_numbers(request.params.n))]

    def group() -> Iterable[tuple[int, list[Request]]]:
        if engine.config.order == "auto":
            return admission.reorder(fix_numbers())
        places: dict[object, int] = {None: 0}
        return sorted(fix_numbers(), key=lambda line: places.setdefault(find_key(line[0]), len(places)))

    def take_all() -> Iterator[Request | None]:
        for number, (request,) in group():
            yield from change(number)
            taken.append(number)
            yield request

    def note_end(number: int, seq: Sequence) -> int:
        admission.learn(seq.prompt_token_ids, len(seq.token_ids) - seq.num_prompt_tokens)
        return taken[number]

    return take_all(), note_end
