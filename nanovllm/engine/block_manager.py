"""Manages the blocks (pages) of the KV cache: gives them out, shares them between equal prefixes, evicts them."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

import xxhash

from nanovllm.engine.sequence import Content, Sequence
from nanovllm.utils.integers import ceil_div


def prefix_digest(parent: bytes, tokens: bytes) -> bytes:
    """Return xxh3_128 of the parent's digest and the block's token ids.

    The parent of a block is the block before it in the sequence. A sequence's first block has `BlockManager.root`.
    """
    return xxhash.xxh3_128_digest(parent + tokens)


def are_equal(one: Content | None, other: Content | None) -> bool:
    """Return whether two contents have the same tokens, and so have all their parents.

    `==` would compare the parents by recursion, and would fail for a long prefix.
    """
    while one is not other:
        if one is None or other is None:
            return False
        digest, parent, tokens = one
        other_digest, other_parent, other_tokens = other
        if digest != other_digest or tokens != other_tokens:
            return False
        one = parent
        other = other_parent
    return True


class BlockManager:
    """Owns `num_blocks` blocks of `block_size` tokens. Every operation takes O(1) time per block.

    The manager knows how many sequences use each block, and the content of each block that can be found.
    `BlockTables` in rows.py knows which sequence has which blocks, in which order.

    A block is in exactly one of three places:

        used        at least one sequence has it in its block table (`_references[block] > 0`)
        evictable   no sequence has it, but its content can be found by digest and used again
        blank       no sequence has it, and its content is of no use

    `take` gives out blank blocks first, then evictable ones, the least recently used first. A sequence gives its blocks
    back in reverse order. So the tail of a prefix is evicted before its head. The other order would be useless: a tail
    cannot be found without its head.

    `_evictable` is an ordered dict, which is a linked list with an index. A hit removes a block from its middle in O(1)
    time; a deque would need O(n).

    `_findable[digest]` is the one block that can be found by that digest. `_content[block]` is this block's digest, its
    parent's content and its token ids; None for a block that cannot be found. Both entries, in `_findable` and in
    `_content`, are removed when the block is given out again or forgotten.

    A content names its parent's content, and so all tokens up to the block's end. A hit must agree on all of them: an
    equal digest, of the block or of a parent, is not enough.

    This comparison takes O(1) time. A sequence that finds a block keeps the block's content in place of its own equal
    one. So the parents of two equal contents are usually one object, at which `are_equal` stops. They are two only if
    the parent was evicted before its child, and computed anew.
    """

    _digest = staticmethod(prefix_digest)
    """Hashes a block, and with it all tokens before the block. Tests put a function here whose digests collide."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.root = b""
        """The hash of the LoRA adapter that is merged into the weights now; b"" without an adapter. It is the parent of
        every first block, so every digest depends on it: a sequence finds only blocks that were computed with the same
        adapter. All sequences must have ended when this changes."""
        self._references = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._findable: dict[bytes, int] = {}
        self._content: list[Content | None] = [None] * num_blocks
        self.on_change: Callable[[str, Iterable[int]], None] = lambda verb, blocks: None
        """Called for each change: the verb "reference", "take", "release", "register" or "forget", and the blocks. A
        block that is taken is forgotten, too, without a call for that."""
        self.on_refusal: Callable[[int], None] = lambda num_lacking: None
        """Called when `can_take` returns False, with the number of blocks that are lacking."""

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
        """Return the blocks of the sequence's first tokens, up to the first block that is not found.

        These blocks hold the KV of the tokens, or a step that is planned will store it there. They hold at most
        `Sequence.max_cached_tokens` tokens, so at least one token is always left to compute. The KV of this token goes
        into a block of the sequence's own. So a sequence never writes into a block that it found.

        The search begins with the first block, and compares the content of each block.
        """
        hits: list[int] = []
        if not self.enable_prefix_caching:
            return hits
        for index in range(seq.max_cached_tokens // self.block_size):
            block = self._find(seq, index)
            if block is None:
                break
            hits.append(block)
        return hits

    def can_take(self, count: int, hits: Seq[int] = ()) -> bool:
        """Return whether the pool can give a reference to each block in `hits`, and then `count` other blocks.

        A hit that no sequence uses is a free block until it gets its reference. So it leaves one free block less for
        the `count` other blocks.
        """
        num_free_hits = sum(1 for block in hits if self._references[block] == 0)
        num_lacking = count + num_free_hits - self.num_free
        if num_lacking > 0:
            self.on_refusal(num_lacking)
        return num_lacking <= 0

    def reference(self, hits: Seq[int]) -> None:
        """Add a reference to each block that was found. Call it before `take`, which could evict them otherwise."""
        self.on_change("reference", hits)
        for block in hits:
            if self._references[block] == 0:
                del self._evictable[block]
            self._references[block] += 1

    def take(self, count: int) -> list[int]:
        """Return `count` blocks without content. Ask `can_take` first: RuntimeError if fewer blocks are free."""
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
        self.on_change("take", taken)
        return taken

    def release(self, blocks: Seq[int]) -> None:
        """Remove one reference from each block of a block table. `blocks` are in the order of the table."""
        self.on_change("release", blocks)
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

        If equal content is findable in another block, that block stays the findable one. Returns False if a block with
        other content has the same digest. Then no later block of the sequence may be registered, because its parent
        could not be found.
        """
        if self._find(seq, index) is not None:
            return True
        content = seq.contents[index]
        digest = content[0]
        if digest in self._findable:
            return False
        block = seq.block_table[index]
        if self._content[block] is not None:
            raise RuntimeError(f"block {block} registered twice")
        self._findable[digest] = block
        self._content[block] = content
        self.on_change("register", [block])
        return True

    def forget(self, seq: Sequence) -> None:
        """Remove all blocks of a sequence from the prefix cache, because their content may be wrong.

        The blocks are looked up by digest. So one of them may be a block that another sequence registered.
        """
        blocks = [self._findable[digest] for digest, _, _ in seq.contents if digest in self._findable]
        self.on_change("forget", blocks)
        for block in blocks:
            self._forget(block)
            if block in self._evictable:
                del self._evictable[block]
                self._blank.append(block)

    def forget_all(self) -> None:
        """Forget the whole prefix cache.

        No sequence may have a block: all must have ended, or been preempted. This runs in four cases: after a failed
        step (KV may be wrong then), before weights are replaced, before the engine sleeps, and when the user asks.
        """
        self.on_change("forget", self._findable.values())
        self._blank.extend(self._evictable)
        self._evictable.clear()
        self._findable.clear()
        self._content = [None] * self.num_blocks

    def _find(self, seq: Sequence, index: int) -> int | None:
        """Return the block that can be found by the content of the sequence's block `index`; None if there is none.

        The sequence's blocks are looked for in order. If a block is found, `seq.contents[index]` becomes its content.
        """
        contents = seq.contents  # the sequence keeps them, so that no block is hashed twice
        if index == len(contents):
            start = index * self.block_size
            tokens = seq.token_ids[start : start + self.block_size].tobytes()
            parent = contents[-1] if contents else (self.root, None, b"")
            contents.append((self._digest(parent[0], tokens), parent, tokens))
        content = contents[index]
        block = self._findable.get(content[0])
        if block is None:
            return None
        found = self._content[block]
        if found is not content:
            if found is None or not are_equal(found, content):
                return None
            contents[index] = found
            if index + 1 < len(contents):  # the next content names the parent that was replaced just now
                digest, _, tokens = contents[index + 1]
                contents[index + 1] = (digest, found, tokens)
        return block

    def _forget(self, block: int) -> None:
        content = self._content[block]
        if content is not None:
            del self._findable[content[0]]
            self._content[block] = None
