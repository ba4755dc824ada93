"""Drafts from texts that were seen: when the last tokens occurred before, what followed then may follow again.

This is prompt lookup (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding) with two differences: an
index replaces the search, and it also covers the outputs of other requests, because those of one job resemble each
other.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence as Seq
from weakref import WeakValueDictionary

import numpy as np

from nanovllm.engine.plan import IntArray
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.engine.sequence import Sequence

NUM_BYTES = 64 << 20
"""Memory of the index: half of it for the table, half for the outputs of ended sequences."""
BYTES_PER_TEXT = 256
"""Counted for each ended output, beside its tokens."""
FEW = 16
"""Up to so many new tokens are indexed one by one; numpy is faster for more."""

_MASK = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15
_MIX = 0xD6E8FEB86659FD93
_SALT = 0xC2B2AE3D27D4EB4F
"""Constants of the hash of an n-gram: see `_find_slots`."""


class NgramDrafter:
    """Finds where the last n tokens of a sequence occurred last, for each n from `shortest` to `longest`.

    The table has a fixed size, and new entries overwrite old ones. So an entry may be lost, or belong to other tokens
    with the same hash; whatever is found is compared. An entry is (number of a text) << 32 | index of the n-gram's last
    token. A text is that of a running sequence, which only this sequence can find, or the output of an ended one, which
    all can. The n-gram at the end of a text is not in the table, because nothing follows it yet.
    """

    def __init__(self, shortest: int, longest: int, num_bytes: int = NUM_BYTES) -> None:
        self._shortest = shortest
        self._longest = longest
        bits = (num_bytes // 2 // 8).bit_length() - 1
        self._table = np.zeros(1 << bits, np.int64)
        self._shift = 64 - bits
        self._room = num_bytes // 2
        """Bytes that are left for the outputs of ended sequences."""
        self._powers = [pow(_FACTOR, n, 1 << 64) for n in range(1, longest + 1)]
        self._texts: WeakValueDictionary[int, array[int]] = WeakValueDictionary()
        """By number: the texts of running sequences, as long as these live, and the ended ones in `_held`."""
        self._held: OrderedDict[int, array[int]] = OrderedDict()
        """By number: the outputs of ended sequences, the oldest first."""
        self._num_texts = 0
        self._drafts: dict[int, array[int]] = {}
        """By seq_id: the drafts that were offered last."""

    def offer(self, seqs: Seq[Sequence], limits: IntArray) -> IntArray:
        self._drafts.clear()
        offers = np.zeros(len(seqs), np.int32)
        for i, limit in enumerate(limits.tolist()):
            if limit:
                drafts = self._guess(seqs[i], limit)
                self._drafts[seqs[i].seq_id] = drafts
                offers[i] = len(drafts)
        return offers

    def write_drafts(self, step: ScheduledStep) -> None:
        for seq, tokens in step.shares():
            if len(tokens) > 1:
                tokens[1:] = self._drafts[seq.seq_id][: len(tokens) - 1]

    def note_end(self, seq: Sequence) -> None:
        """Keep its output, with the last tokens of the prompt before it; drop the oldest outputs to make room."""
        text = seq.token_ids[max(seq.num_prompt_tokens - self._longest, 0) :]
        self._room -= 4 * len(text) + BYTES_PER_TEXT
        number = self._add_text(text)
        self._held[number] = text
        self._index_many(text, 0, len(text) - 1, number, 0)
        while self._room < 0:
            _, oldest = self._held.popitem(last=False)
            self._room += 4 * len(oldest) + BYTES_PER_TEXT

    def _add_text(self, text: "array[int]") -> int:
        self._num_texts += 1
        self._texts[self._num_texts] = text
        return self._num_texts

    def _guess(self, seq: Sequence, limit: int) -> "array[int]":
        """Return what may follow a sequence: at most `limit` tokens, and at most as many as agree before them."""
        text = seq.token_ids
        found, at, length = self._find_longest_match(seq, max(limit, self._longest))
        drafts = found[at + 1 : at + 1 + min(length, limit)]
        if found is text and 0 < len(drafts) < min(length, limit):  # the text repeats itself up to its end
            drafts = (drafts * limit)[: min(length, limit)]
        return drafts

    def _find_longest_match(self, seq: Sequence, most: int) -> tuple["array[int]", int, int]:
        """Find the text that agrees with the most last tokens of a sequence; its own new tokens are indexed first.

        Args:
            most: agreement is counted up to so many tokens.

        Returns:
            The text, the index of the last token that agrees, and how many agree: 0 if fewer than `shortest` do.
        """
        text = seq.token_ids
        last = len(text) - 1
        record = seq.drafting
        own, start = record.drafter_state or (self._add_text(text), 0)
        if last - start > FEW:
            self._index_many(text, start, last, own, own)
        else:
            for at in range(start, last):
                for slot in self._find_slots(text, at, own):
                    self._table[slot] = own << 32 | at
        record.drafter_state = (own, last)  # the number of its text, and how many of its tokens are indexed
        best = (text, 0, 0)
        for owner in (own, 0):
            for slot in reversed(self._find_slots(text, last, owner)):  # the longest n-gram first
                number, at = divmod(int(self._table[slot]), 1 << 32)
                other = self._texts.get(number)
                if other is None or at >= len(other) - 1:
                    continue
                length = self._count_agreeing(text, other, at, most)
                if length >= self._shortest:
                    if length > best[2]:
                        best = (other, at, length)
                    break
        return best

    def _count_agreeing(self, text: "array[int]", other: "array[int]", at: int, most: int) -> int:
        """Return how many of the last tokens of `text` are those of `other` up to `at`; stop counting at `most`."""
        last = len(text) - 1
        most = min(most, len(text), at + 1)  # neither text has tokens before its first
        length = 0
        while length < most and text[last - length] == other[at - length]:
            length += 1
        return length

    def _find_slots(self, text: "array[int]", at: int, owner: int) -> list[int]:
        """Return the slots of the table for the n-grams that end at an index, from the shortest to the longest.

        The hash of an n-gram is a polynomial of its tokens, multiplied by _MIX, of which the high bits are taken. The
        owner is part of it: the number of a running sequence's text, or 0 for outputs, which all sequences find.
        """
        key = owner * _SALT
        slots = []
        for n, power in enumerate(self._powers[: at + 1]):
            key += (text[at - n] + 1) * power
            if n + 1 >= self._shortest:
                slots.append((key * _MIX & _MASK) >> self._shift)
        return slots

    def _index_many(self, text: "array[int]", start: int, end: int, number: int, owner: int) -> None:
        """Enter the n-grams that end at start..end - 1 into the table: `_find_slots` for all of them at once."""
        first = max(start - self._longest, 0)
        tokens = np.array(text[first:end], np.uint64) + np.uint64(1)
        indices = np.arange(first, end)
        keys = np.full(len(tokens), owner * _SALT & _MASK, np.uint64)
        for n, power in enumerate(self._powers[: len(tokens)]):
            keys[n:] += tokens[: len(tokens) - n] * np.uint64(power)
            if n + 1 >= self._shortest:
                new = slice(max(start - first, n), None)
                slots = (keys[new] * np.uint64(_MIX)) >> np.uint64(self._shift)
                self._table[slots.astype(np.int64)] = indices[new] + (number << 32)
