"""Checks of what must hold for blocks, rows and sequences between any two steps."""

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Content, Sequence


def check_blocks(manager: BlockManager) -> None:
    """Check that every block is in exactly one place, and that the index agrees with the contents."""
    used = {block for block, references in enumerate(manager._references) if references > 0}
    blank = set(manager._blank)
    evictable = set(manager._evictable)
    counts = {"used": len(used), "blank": len(manager._blank), "evictable": len(manager._evictable)}
    assert sum(counts.values()) == manager.num_blocks, f"{counts} do not make {manager.num_blocks}"
    assert used | blank | evictable == set(range(manager.num_blocks)), counts
    assert min(manager._references, default=0) >= 0
    findable = {block: content[0] for block, content in enumerate(manager._content) if content is not None}
    assert findable == {block: digest for digest, block in manager._findable.items()}
    assert not blank & findable.keys() and not evictable - findable.keys()
    for content in filter(None, manager._content):
        digest, parent, tokens = content
        assert parent is not None and digest == manager._digest(parent[0], tokens)


def check_contents(manager: BlockManager, seq: Sequence) -> None:
    """Check that each of a sequence's blocks that can be found holds the sequence's tokens, after all those before."""
    for index, block in enumerate(seq.block_table):
        content = manager._content[block]
        if content is not None:
            assert read_prefix(content) == seq.token_ids[: (index + 1) * manager.block_size].tobytes()


def read_prefix(content: Content | None) -> bytes:
    """Return the token ids of a content, and of all those before it."""
    parts = []
    while content is not None:
        _, content, tokens = content
        parts.append(tokens)
    return b"".join(reversed(parts))


def check_scheduler(scheduler: Scheduler) -> None:
    """Check that rows, tables and blocks agree."""
    table = scheduler.table
    resident = scheduler.table.resident
    manager = scheduler.block_manager
    check_blocks(manager)
    references = [0] * manager.num_blocks
    for row, seq in resident.items():
        assert seq.row == row and len(seq.block_table) * manager.block_size == scheduler.blocks.room[row], seq
        counts = [0, table.num_computed[row], table.num_tokens[row], table.num_needed[row] + 1]
        assert counts == sorted(counts) and table.num_known[row] == len(seq.token_ids), (seq, counts)
        for block in seq.block_table:
            references[block] += 1
        check_contents(manager, seq)
    assert references == manager._references
    assert table.order.tolist() == list(resident)
    assert sorted([*resident, *table._free]) == list(range(table.num_rows))
