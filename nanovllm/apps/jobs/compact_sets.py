"""Two sets and a map that stay small when a job has millions of lines: of ids, of line numbers, of places."""

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

import xxhash

NUM_SHARDS = 1024


class DigestSet:
    """A set of strings that keeps only their 64-bit digests: 8.5 bytes each. A set of Python integers takes 60 or more.

    The digests are sorted within 1024 shards. Adding one moves half a shard (40 KB with 10 million entries), and
    growing reallocates one shard, so memory has no peaks. Two strings with the same digest count as equal. Among n
    strings that has a probability of n * n / 2**65: 3 in a million for 10 million lines.
    """

    def __init__(self) -> None:
        self._shards = [array("Q") for _ in range(NUM_SHARDS)]

    def add(self, key: str) -> bool:
        """Add a string; return False if it was there."""
        digest = xxhash.xxh3_64_intdigest(key.encode())
        shard = self._shards[digest % NUM_SHARDS]
        at, is_there = _find(shard, digest)
        if not is_there:
            shard.insert(at, digest)
        return not is_there


class DigestMap:
    """A map from strings to 64-bit numbers that keeps the strings as a `DigestSet` does: 17 bytes an entry.

    Two strings may have one digest. Then the first of them is kept, so whoever gets a number must check whose it is.
    """

    def __init__(self) -> None:
        self._shards = [array("Q") for _ in range(NUM_SHARDS)]
        self._numbers = [array("Q") for _ in range(NUM_SHARDS)]

    def add(self, key: str, number: int) -> None:
        """Add a string with its number, unless it is there."""
        digest = xxhash.xxh3_64_intdigest(key.encode())
        shard = self._shards[digest % NUM_SHARDS]
        at, is_there = _find(shard, digest)
        if not is_there:
            shard.insert(at, digest)
            self._numbers[digest % NUM_SHARDS].insert(at, number)

    def get(self, key: str) -> int | None:
        """Return the number of a string; None if it is not there."""
        digest = xxhash.xxh3_64_intdigest(key.encode())
        at, is_there = _find(self._shards[digest % NUM_SHARDS], digest)
        return self._numbers[digest % NUM_SHARDS][at] if is_there else None


def _find(shard: "array[int]", digest: int) -> tuple[int, bool]:
    """Return the place of a digest in a shard, and whether it is there."""
    at = bisect_left(shard, digest)
    return at, at < len(shard) and shard[at] == digest


class LineSet:
    """A set of line numbers. It takes one bit for each number up to the largest."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._count = 0

    def add(self, number: int) -> bool:
        """Add a number; return False if it was there."""
        if number in self:
            return False
        byte, bit = divmod(number, 8)
        self._bits.extend(bytes(max(byte + 1 - len(self._bits), 0)))
        self._bits[byte] |= 1 << bit
        self._count += 1
        return True

    def minus(self, other: "LineSet") -> Iterator[int]:
        """Yield the numbers that are not in `other`, in ascending order."""
        for byte, bits in enumerate(self._bits):
            if rest := bits & ~(other._bits[byte] if byte < len(other._bits) else 0):
                yield from (8 * byte + bit for bit in range(8) if rest >> bit & 1)

    def __contains__(self, number: Any) -> bool:
        byte, bit = divmod(number, 8)
        return 0 <= byte < len(self._bits) and bool(self._bits[byte] >> bit & 1)

    def __len__(self) -> int:
        return self._count
