"""The order in which requests that are known in advance are admitted.

If the KV cache cannot hold all prefixes that requests share, the requests with one prefix run one after another. And a
batch ends sooner if its longest requests do not begin last. A job begins with its shortest line, so that somebody who
waits sees a result. The order is decided before the engine gets a request.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from nanovllm.config import ResolvedConfig
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.order import Order
from nanovllm.engine.sequence import Request

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
        max_len: the most tokens of its prompt and its output together.
        key: candidates with one key come together.
        reason: why its turn comes, for the trace.
    """

    line: tuple[Any, list[Request]]
    number: int
    prompt: bytes
    max_tokens: int
    max_len: int
    key: object = None
    reason: str = "in turn"


def sort_by_prefix(
    candidates: list[Candidate], config: ResolvedConfig, num_blocks: int, last: bytes = b""
) -> list[Candidate]:
    """Return candidates with common prefixes together; in the given order if the pool keeps all that they share.

    All are divided by the first block in which they differ, and each part is treated likewise. First comes the part of
    the prompt `last`, whose prefix is in the cache; then the largest part; of equal ones the one with the longest
    output.

    Args:
        candidates: in the given order.
        num_blocks: how many blocks the pool has.
        last: the prompt of the candidate whose turn came before.
    """
    if len(candidates) < 2 or not config.enable_prefix_caching:
        return candidates
    block_bytes = 4 * config.block_size
    by_prompt = sorted(candidates, key=lambda one: one.prompt)
    pairs = pairwise(by_prompt)
    common = np.array([count_common_blocks(before.prompt, one.prompt, block_bytes) for before, one in pairs])
    lengths = np.array([min(len(one.prompt) // 4 + one.max_tokens, one.max_len) for one in by_prompt])
    needed = -(-lengths // config.block_size)
    depth = common.min()  # what all share stays in the cache
    if keeps_prefixes(needed - depth, common - depth, config.max_num_seqs, num_blocks - depth):
        return candidates
    ordered = []
    parts = [(0, len(by_prompt))]
    while parts:
        start, end = parts.pop()
        if end - start == 1:
            ordered.append(by_prompt[start])
            continue
        inside = common[start : end - 1]
        depth = inside.min()
        bounds = [start, *(start + 1 + np.flatnonzero(inside == depth)).tolist(), end]
        size = (depth + 1) * block_bytes
        places = []
        for first, after in pairwise(bounds):
            one = by_prompt[first]
            one.reason = f"by prefix: {end - start} share {depth} blocks" if depth else "in turn"
            is_next = one.prompt[:size] == last[:size]
            longest = max(other.max_tokens for other in by_prompt[first:after]) if after - first > 1 else 0
            places.append((is_next, after - first, longest, -one.number, first, after))
        parts += [(first, after) for *_, first, after in sorted(places)]  # the last one is the next
    return ordered


def count_common_blocks(one: bytes, other: bytes, block_bytes: int) -> int:
    """Return how many whole blocks two prompts have in common at their beginnings."""
    if not other.startswith(one[:block_bytes]):
        return 0
    most = min(len(one), len(other)) // block_bytes
    return bisect_left(range(most), True, key=lambda i: not other.startswith(one[: (i + 1) * block_bytes]))


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


def put_shortest_first(candidates: list[Candidate]) -> list[Candidate]:
    """Return candidates in the same order, but first the one with the shortest output: its result comes early."""
    shortest = min(candidates, key=lambda one: one.max_tokens, default=None)
    if shortest is not None and shortest is not candidates[0]:
        shortest.reason = f"shortest first: max_tokens {shortest.max_tokens}"
    return sorted(candidates, key=lambda one: one is not shortest)


def put_longest_first(ordered: list[Candidate], num_rows: int, num_slots: int) -> list[Candidate]:
    """Return candidates in the same order, but of the last ones the longest first.

    The outputs of these last ones together are at most as long as the longest output for each row, so that one cannot
    begin too late. To sort all by length would be slower: short outputs would come together, and steps compute more
    prompts than they can beside the outputs without taking longer. If max_tokens is the same for all, nothing changes.
    Nor does it if the pools cannot hold as many of the longest as run at a time: side by side some of these would be
    preempted, and computed again.

    Args:
        num_rows: how many run at a time.
        num_slots: how many tokens the pools hold.
    """
    num_rows = min(num_rows, len(ordered))
    longest = sorted(len(one.prompt) // 4 + one.max_tokens for one in ordered)[-num_rows:]
    lengths = [one.max_tokens for one in ordered]
    if len(set(lengths)) <= 1 or sum(longest) > num_slots:
        return ordered
    work = np.cumsum(lengths[::-1])
    num_early = len(ordered) - int(np.searchsorted(work, num_rows * max(lengths), side="right"))
    late = sorted(ordered[num_early:], key=lambda one: (-one.max_tokens, one.number))
    for one in late:
        one.reason = f"longest first: max_tokens {one.max_tokens}"
    return ordered[:num_early] + late


class Admission:
    """Reorders requests on their way to the engine. Of those that it has handed on it keeps only the last one."""

    def __init__(
        self,
        engine: LLMEngine,
        find_key: Callable[[Any], object] = lambda item: None,
        *,
        is_list: bool = False,
        keeps_order: bool = False,
    ) -> None:
        """
        Args:
            find_key: tells the adapter of what the caller knows a line by. Lines with one key come together, those with
                the key None first.
            is_list: all requests are there. Otherwise they are read ahead, as far as there is room.
            keeps_order: lines are only grouped by their keys.
        """
        self._config = engine.config
        self._find_key = find_key
        self._is_list = is_list
        self._keeps_order = keeps_order
        self._num_rows = engine.config.max_num_seqs * engine.config.data_parallel_size
        """How many sequences run at a time; with replicas, in all of them."""
        self._num_blocks = engine.scheduler.block_manager.num_blocks
        """The blocks of one pool. Each replica has one."""
        self._num_slots = self._num_blocks * engine.config.block_size * engine.config.data_parallel_size
        """The tokens that all pools hold."""
        self._new: list[Candidate] = []
        """Candidates that came since the last sorting."""
        self._sorted: list[Candidate] = []
        """The others. The last one is the next."""
        self._num_read = 0
        self._num_bytes = 0
        """The bytes of the prompts of all candidates."""
        self._last = Candidate((None, []), -1, b"", 0, 0)
        """The one whose turn came last. At first this stands for the empty cache and the model without an adapter."""

    @property
    def need_not_wait(self) -> bool:
        """Whether a job can go on without its next line."""
        return bool(self._new or self._sorted) and self._num_read >= FIRST_LINES * self._num_rows

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
            while not self._is_list and self._is_full():
                yield self._take()
        self._sort(has_all=True)
        while self._sorted:
            yield self._take()

    def _is_full(self) -> bool:
        num_lines = len(self._new) + len(self._sorted)
        return num_lines >= LINES_AHEAD * self._num_rows or self._num_bytes >= 4 * TOKENS_AHEAD

    def _add(self, line: tuple[Any, list[Request]]) -> None:
        longest = max(line[1], key=lambda request: len(request.prompt_token_ids))
        max_tokens = longest.params.max_tokens
        max_len = longest.max_len or self._config.max_model_len
        limit = max_len if max_tokens is None else max_tokens
        prompt = longest.prompt_token_ids.tobytes()
        self._new.append(Candidate(line, self._num_read, prompt, limit, max_len, self._find_key(line[0])))
        self._num_read += 1
        self._num_bytes += len(prompt)

    def _take(self) -> tuple[Any, list[Request]]:
        if 3 * len(self._new) > len(self._sorted):  # so each is sorted about four times
            self._sort()
        one = self._sorted.pop()
        item, requests = one.line
        self._num_bytes -= len(one.prompt)
        self._last = one
        return item, [replace(request, reason=one.reason) for request in requests]

    def _sort(self, has_all: bool = False) -> None:
        """Sort all candidates anew. With `has_all` no others follow, and the longest ones of the last come first."""
        candidates = sorted([*self._sorted, *self._new], key=lambda one: one.number)
        for one in candidates:
            one.reason = "in turn"
        if self._last.number < 0 and not (self._is_list or self._keeps_order):
            candidates = put_shortest_first(candidates)
        by_key: dict[object, list[Candidate]] = {self._last.key: []}  # the adapter that is in use comes first
        for one in candidates:
            by_key.setdefault(one.key, []).append(one)
        ordered: list[Candidate] = []
        for members in by_key.values():
            if not self._keeps_order:
                members = sort_by_prefix(members, self._config, self._num_blocks, self._last.prompt)
                if has_all:
                    members = put_longest_first(members, self._num_rows, self._num_slots)
            ordered += members
        self._new = []
        self._sorted = ordered[::-1]


class SoonestOrder(Order):
    """The order in which a list of requests ends soonest. With order="given" they are only grouped by their keys."""

    def list_requests(self) -> Iterator[tuple[int, Request] | None]:
        lines = [(number, [request]) for number, request in filter(None, super().list_requests())]
        keeps_order = self._engine.config.order == "given"
        admission = Admission(self._engine, self.find_key, is_list=True, keeps_order=keeps_order)
        for number, (request,) in admission.reorder(lines):
            yield number, request

    def find_key(self, number: int) -> object:
        """Return the key of a request: see `Admission`."""
        return None
