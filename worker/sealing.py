"""Creates the seal items of a full block, one for each KV group."""

from __future__ import annotations

from block_store.ledger.codec import SealItem
from block_store.ledger.prefix_hash import group_hash
from engine.sequence import Sequence


def seal_items(sequence: Sequence, block: int) -> list[SealItem]:
    """Returns the items, one per KV group, that publish the full block with index `block`. The block's hash must be
    known.
    """
    block_hash, quota = sequence.block_hash(block), sequence.quota_of(block)
    return [SealItem(table[block], group_hash(block_hash, g), quota) for g, table in enumerate(sequence.tables)]
