"""What has to hold of the books of a cache at any time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.prefix_cache import PrefixCache
from sarathi_lab.engine.request import SequenceState


def check_integrity(blocks: BlockManager, sequences: Iterable[SequenceState]) -> None:
    """Raise AssertionError unless every block is free, held by one of these, or shared."""
    sequences = list(sequences)
    held = [block for sequence in sequences for block in sequence.block_ids]
    unused = [] if blocks.prefix is None else _unused_blocks(blocks.prefix, held)
    everything = [*(held if blocks.prefix is None else set(held)), *blocks.empty, *unused]
    if sorted(everything) != list(range(blocks.num_blocks)):
        raise AssertionError(
            f"{len(held)} held + {blocks.num_free} free blocks are not the {blocks.num_blocks} "
            "blocks"
        )
    of_windows = sum(blocks.window_pool.held_by(sequence) for sequence in sequences)
    if of_windows + blocks.window_pool.num_free != blocks.window_pool.num_blocks:
        raise AssertionError(
            f"{of_windows} held + {blocks.window_pool.num_free} free blocks are not the "
            f"{blocks.window_pool.num_blocks} blocks of the pool for windows"
        )
    for sequence in sequences:
        if len(sequence.block_ids) * blocks.block_size < sequence.num_computed:
            raise AssertionError(f"{sequence} has computed more tokens than its blocks hold")


def _unused_blocks(prefix: PrefixCache, held: Iterable[int]) -> list[int]:
    """Raise AssertionError unless `held` fits the counted holders; returns the unused blocks."""
    counts, cached = Counter(held), set(prefix.blocks.values())
    for block, number in enumerate(prefix.num_holders):
        expected = number if block in cached else min(counts[block], 1)
        if counts[block] != expected:
            raise AssertionError(f"block {block} has {counts[block]} holders, not {expected}")
        if number and block not in cached:
            raise AssertionError(f"block {block} has counted holders, but no key")
    unused = list(prefix.unused)
    if sorted(unused) != sorted(block for block in cached if not prefix.num_holders[block]):
        raise AssertionError("what nobody holds is not what is unused")
    return unused
