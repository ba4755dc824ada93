"""Drafts from text that was seen: what followed the same last tokens before may follow again.

Prompt lookup (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding), with an index in place of a search,
and not only in the sequence's own text: requests of one job resemble each other.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence as Seq
from weakref import WeakValueDictionary

import numpy as np

from nanovllm.engine.plan import IntArray
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import ScheduledStep

NUM_BYTES = 64 << 20
"""What the index may take in all: half of it for the table, half for ended outputs."""
BYTES_PER_TEXT = 256
"""Allowance for an ended output, beside its tokens."""

_MASK = (1 << 64) - 1
_FACTOR, _MIX, _SALT = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0xC2B2AE3D27D4EB4F
FEW = 16
"""So many new tokens are indexed one by one; numpy is quicker for more."""


class NgramDrafter:
    """An index from the last n tokens, for each n from `shortest` to `longest`, to where they occurred last.

    It has a table of a fixed size, in which what is newer overwrites what is older: an entry may be lost, or lead to
    other tokens, so whatever it finds is compared. An entry is (number of a text) << 32 | place of the n-gram's last
    token. A text is that of a running sequence, found by that sequence alone, or the output of one that has ended,
    found by all. The n-gram of a text's end is not in the table: nothing follows it yet.
    """

    def __init__(self, shortest: int, longest: int, num_bytes: int = NUM_BYTES) -> None:
        self._shortest, self._longest = shortest, longest
        bits = (num_bytes // 2 // 8).bit_length() - 1
        self._table, self._shift = np.zeros(1 << bits, np.int64), 64 - bits
        self._room = num_bytes // 2
        self._powers = [pow(_FACTOR, n, 1 << 64) for n in range(1, longest + 1)]
        self._texts: WeakValueDictionary[int, array[int]] = WeakValueDictionary()
        """By number: those of running sequences as long as these live, and the ended ones that are held."""
        self._held: OrderedDict[int, array[int]] = OrderedDict()
        self._num_texts = 0
        self._drafts: dict[int, array[int]] = {}
        """By seq_id, what was offered last."""

    def offer(self, seqs: Seq[Sequence], most: IntArray) -> IntArray:
        self._drafts.clear()
        offers = np.zeros(len(seqs), np.int32)
        for i, count in enumerate(most.tolist()):
            if count:
                drafts = self._drafts[seqs[i].seq_id] = self._guess(seqs[i], count)
                offers[i] = len(drafts)
        return offers

    def draft(self, step: ScheduledStep) -> None:
        for seq, tokens in step.shares():
            if len(tokens) > 1:
                tokens[1:] = self._drafts[seq.seq_id][: len(tokens) - 1]

    def ended(self, seq: Sequence) -> None:
        """Keep its output, and the prompt's last tokens, which the output followed; forget the oldest for it."""
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

    def _guess(self, seq: Sequence, count: int) -> "array[int]":
        """What may follow a sequence: at most count tokens, and no more than those before it that agree."""
        text = seq.token_ids
        record = seq.drafting
        own, start = record.notes or (self._add_text(text), 0)
        last = len(text) - 1
        if last - start > FEW:
            self._index_many(text, start, last, own, own)
        else:
            for place in range(start, last):
                for slot in self._slots(text, place, own):
                    self._table[slot] = own << 32 | place
        record.notes = own, last  # the number of its text, and up to where it is indexed
        best, found, place = 0, text, 0
        for owner in (own, 0):
            for slot in reversed(self._slots(text, last, owner)):
                number, at = divmod(int(self._table[slot]), 1 << 32)
                if (other := self._texts.get(number)) is None or at >= len(other) - 1:
                    continue
                length = self._agreement(text, other, at, max(count, self._longest))
                if length >= self._shortest:
                    if length > best:
                        best, found, place = length, other, at
                    break
        drafts = found[place + 1 : place + 1 + min(best, count)]
        if found is text and 0 < len(drafts) < min(best, count):  # it repeats itself, and goes on to do so
            drafts = (drafts * count)[: min(best, count)]
        return drafts

    def _agreement(self, text: "array[int]", other: "array[int]", at: int, most: int) -> int:
        """How many of the last tokens of text are those of other up to `at`, counted up to `most`."""
        length, last, most = 0, len(text) - 1, min(most, len(text), at + 1)  # either may begin sooner
        while length < most and text[last - length] == other[at - length]:
            length += 1
        return length

    def _slots(self, text: "array[int]", place: int, owner: int) -> list[int]:
        """Where the table holds the n-grams that end at a place, the shortest first."""
        key, slots, salt = owner * _SALT, [], self._shortest
        for n, power in enumerate(self._powers[: place + 1]):
            key += (text[place - n] + 1) * power
            if n + 1 >= salt:
                slots.append((key * _MIX & _MASK) >> self._shift)
        return slots

    def _index_many(self, text: "array[int]", start: int, end: int, number: int, owner: int) -> None:
        """Put the n-grams that end at start..end - 1 into the table: `_slots` of all of them at once."""
        first = max(start - self._longest, 0)
        tokens = np.array(text[first:end], np.uint64) + np.uint64(1)
        places = np.arange(first, end)
        keys = np.full(len(tokens), owner * _SALT & _MASK, np.uint64)
        for n, power in enumerate(self._powers[: len(tokens)]):
            keys[n:] += tokens[: len(tokens) - n] * np.uint64(power)
            if n + 1 >= self._shortest:
                new = slice(max(start - first, n), None)
                slots = (keys[new] * np.uint64(_MIX)) >> np.uint64(self._shift)
                self._table[slots.astype(np.int64)] = places[new] + (number << 32)
