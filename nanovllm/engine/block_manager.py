"""Hands out the pages of the KV cache, shares them by prefix, and evicts them."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

import xxhash

from nanovllm.engine.sequence import Sequence
from nanovllm.utils.integers import ceil_div


def prefix_digest(parent: bytes, tokens: bytes) -> bytes:
    """Return xxh3_128 of the parent block's digest (b"" for the first block) and the block's token ids."""
    return xxhash.xxh3_128_digest(parent + tokens)


class BlockManager:
    """Owns `num_blocks` pages of `block_size` tokens. Every operation takes O(1) time a block.

    It knows which block holds what, and how often each is used. Which sequence has which blocks, and in which order, is
    kept by `BlockTables` in rows.py.

    A block is in exactly one of three places:

        used        at least one sequence has it in its block table (`_references[block] > 0`)
        evictable   no sequence has it, but its content can be found by digest and used again
        blank       no sequence has it, and its content is of no use

    Blank blocks are handed out first, then evictable ones, the least recently used first. `_evictable` is an ordered
    dict (a linked list with an index) because a hit takes a block out of its middle, which takes O(n) in a deque. A
    sequence gives its blocks back tail first. So the tail of a prefix is evicted before its head, without which the
    tail could not be found.

    `_findable[digest]` is the one block that can be found by that digest. `_content[block]` is its digest, its parent's
    digest and its token ids. A hit must agree on all three, so a collision of digests costs a miss, never wrong KV.
    Both entries are dropped when the block is handed out again.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        digest: Callable[[bytes, bytes], bytes] = prefix_digest,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._digest = digest
        self._references = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._findable: dict[bytes, int] = {}
        self._content: list[tuple[bytes, bytes, bytes] | None] = [None] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._evictable)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks num_tokens tokens take."""
        return ceil_div(num_tokens, self.block_size)

    def find_prefix(self, seq: Sequence) -> list[int]:
        """Return the longest run of blocks that hold the KV of the sequence's first tokens.

        It covers at most `Sequence.max_cached_tokens`. So at least one token is always left to compute, into a block
        of the sequence's own, and nothing ever writes into a shared block.
        """
        hits: list[int] = []
        if not self.enable_prefix_caching:
            return hits
        for index in range(seq.max_cached_tokens // self.block_size):
            content = self._content_of(seq, index)
            block = self._findable.get(content[0])
            if block is None or self._content[block] != content:
                break
            hits.append(block)
        return hits

    def can_take(self, count: int, hits: Seq[int]) -> bool:
        """Return whether `count` blocks could be taken after `hits` were referenced."""
        revived = sum(1 for block in hits if self._references[block] == 0)
        return count <= self.num_free - revived

    def reference(self, hits: Iterable[int]) -> None:
        """Add a reference to each block that was found. To be called before `take`, which could evict them."""
        for block in hits:
            if self._references[block] == 0:
                del self._evictable[block]
            self._references[block] += 1

    def take(self, count: int) -> list[int]:
        """Return `count` blocks without content; RuntimeError if there are not so many: ask `can_take` before."""
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks wanted, {self.num_free} of {self.num_blocks} free")
        taken = []
        for _ in range(count):
            if self._blank:
                block = self._blank.pop()
            else:
                block, _ = self._evictable.popitem(last=False)
                self._forget(block)
            self._references[block] = 1
            taken.append(block)
        return taken

    def release(self, blocks: Seq[int]) -> None:
        """Give back one reference to each block of a block table, whose order they have."""
        for block in reversed(blocks):
            references = self._references[block] - 1
            self._references[block] = references
            if references > 0:
                continue
            if references < 0:
                raise RuntimeError(f"block {block} given back more often than it was taken")
            if self._content[block] is None:
                self._blank.append(block)
            else:
                self._evictable[block] = None

    def register(self, seq: Sequence, index: int) -> bool:
        """Make block `index` of the sequence findable. The block is full, and its token ids are known.

        If equal content is findable in another block, that one stays. Returns False if a block with other content has
        the same digest. Then no later block of the sequence may be registered, because its parent could not be found.
        """
        content = self._content_of(seq, index)
        holder = self._findable.get(content[0])
        if holder is not None:
            return self._content[holder] == content
        block = seq.block_table[index]
        if self._content[block] is not None:
            raise RuntimeError(f"block {block} registered twice")
        self._findable[content[0]] = block
        self._content[block] = content
        return True

    def forget(self, seq: Sequence) -> None:
        """Make no block of a sequence findable any more, because what they hold is not to be trusted."""
        for block in [self._findable[digest] for digest in seq.digests if digest in self._findable]:
            self._forget(block)
            if block in self._evictable:
                del self._evictable[block]
                self._blank.append(block)

    def forget_all(self) -> None:
        """Forget the whole prefix cache. The engine calls it after a failed step: nobody knows what the cache holds."""
        self._blank.extend(self._evictable)
        self._evictable.clear()
        self._findable.clear()
        self._content = [None] * self.num_blocks

    def _content_of(self, seq: Sequence, index: int) -> tuple[bytes, bytes, bytes]:
        """Return (digest, parent's digest, token ids) of a full block of the sequence."""
        size = self.block_size
        digests = seq.digests  # kept there, so that no block is hashed twice
        while len(digests) <= index:
            start = len(digests) * size
            parent = digests[-1] if digests else b""
            digests.append(self._digest(parent, seq.token_ids[start : start + size].tobytes()))
        tokens = seq.token_ids[index * size : (index + 1) * size].tobytes()
        return digests[index], digests[index - 1] if index else b"", tokens

    def _forget(self, block: int) -> None:
        content = self._content[block]
        if content is not None:
            del self._findable[content[0]]
            self._content[block] = None
