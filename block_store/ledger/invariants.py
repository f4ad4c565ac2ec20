"""Checks of the ledger's invariants (docs/design.md, Invariants), at one moment or between two moments.

`check` is for a ledger that no other process changes, and `check_running` is for a running store. Each finding begins
with the invariant's name. I7 to I10 concern bytes, operations or a period of time, not a single moment; the tests check
them. I2 needs no check: a block's generation is stored only once, and I3 says when it may change.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from block_store.ledger.inspection import BlockState, Inspection, inspect
from block_store.ledger.scripts import LedgerScripts
from common.types import BlockRef, Epoch

LOOKS = 5
SETTLE_S = 0.3


def check(ledger: LedgerScripts, before: Inspection | None = None) -> list[str]:
    """Reads the ledger, and returns the violations that are found in it. If `before`, an earlier inspection, is given,
    also checks the changes since then.
    """
    return findings(ledger, inspect(ledger, with_blocks=True), before)


def check_running(ledger: LedgerScripts) -> list[str]:
    """Returns the findings for a ledger that is in use, without those that disappear when the ledger is read again."""
    return lasting(lambda: check(ledger))


def lasting(look: Callable[[], Sequence[str]]) -> list[str]:
    """Calls `look` up to LOOKS times, until no findings remain, and returns the findings that all calls have in common.
    If a ledger changes while it is read in parts, a single call can report violations that do not exist.
    """
    found = list(dict.fromkeys(look()))
    for _ in range(LOOKS - 1):
        if found:
            time.sleep(SETTLE_S)
            now = set(look())
            found = [finding for finding in found if finding in now]
    return found


def findings(ledger: LedgerScripts, now: Inspection, before: Inspection | None = None) -> list[str]:
    """Returns the violations that are found in `now`, which the caller has just read from the ledger. If `before` is
    given, also checks the changes since then.
    """
    found = [*_accounting(now), *_references(now), *_index(now), *_fencing(ledger, now)]
    return found if before is None else [*found, *changes(before, now)]


def changes(before: Inspection, now: Inspection) -> list[str]:
    """Returns the violations of I3 and I11 between two inspections that are one operation apart. A generation must
    change only upwards, and only in a FREE or CACHED block without references.
    """
    found: list[str] = []
    for block, (old, new) in enumerate(zip(before.blocks, now.blocks, strict=True)):
        if new.generation == old.generation:
            continue
        if old.state not in (BlockState.FREE, BlockState.CACHED) or old.holders:
            found.append(f"I3: block {block} changed generation in state {old.state.name} held by {old.holders}")
        if new.generation < old.generation:
            found.append(f"I11: block {block} went from generation {old.generation} back to {new.generation}")
    return found


def _accounting(now: Inspection) -> list[str]:
    found: list[str] = []
    states, counts = Counter(block.state for block in now.blocks), now.counts
    told = (counts.free, counts.reserved, counts.sealed, counts.cached, counts.quarantine)
    if told != tuple(states[state] for state in BlockState) or sum(told) != counts.total:
        found.append(f"I1: counts {counts} but blocks say {dict(states)}")
    listed = {
        BlockState.FREE: now.free, BlockState.CACHED: now.cached, BlockState.QUARANTINE: [b for b, _ in now.quarantine],
    }  # fmt: skip
    for state, blocks in listed.items():
        if sorted(blocks) != [i for i, block in enumerate(now.blocks) if block.state is state]:
            found.append(f"I1: the list of {state.name} blocks is {sorted(blocks)}")
    found += _quotas(now)
    for block, slot in now.quarantine:
        if now.blocks[block].writer_slot != slot:
            found.append(f"I1: block {block} waits for writer slot {slot}, not for its own")
    return found


def _quotas(now: Inspection) -> list[str]:
    """Checks I1 for the blocks that count against a tenant's quota."""
    found: list[str] = []
    for owner, owned in (now.owned or {}).items():
        if owned != tuple(block for block in now.cached if now.blocks[block].owner == owner):
            found.append(f"I1: the CACHED blocks of owner {owner} are {owned}")
    return found


def _references(now: Inspection) -> list[str]:
    found: list[str] = []
    holder_side = {(holder.epoch, ref) for holder in now.holders for ref in holder.own}
    dying = {(epoch, BlockRef(b, now.blocks[b].generation)) for epoch, left in (now.dying or {}).items() for b in left}
    block_side = {
        (epoch, BlockRef(i, block.generation)) for i, block in enumerate(now.blocks) for epoch in block.holders
    }
    live = {holder.epoch: holder for holder in now.holders}
    if holder_side | dying != block_side:
        found.append(f"I4: sides differ by {sorted((holder_side | dying) ^ block_side)}")
    for i, block in enumerate(now.blocks):
        if len(set(block.holders)) != len(block.holders):
            found.append(f"I4: block {i} names a holder twice: {block.holders}")
        if bool(block.holders) != (block.state in (BlockState.RESERVED, BlockState.SEALED)):
            found.append(f"I1: block {i} is {block.state.name} with holders {block.holders}")
        if block.state is BlockState.RESERVED and block.holders != (Epoch(block.writer_epoch),):
            found.append(f"I1: block {i} is written by {block.writer_epoch} but held by {block.holders}")
        if gone := set(block.holders) - set(live) - set(now.dying or ()):
            found.append(f"I5: block {i} is held by {gone}, who are not live")
    return found


def _index(now: Inspection) -> list[str]:
    found: list[str] = []
    index = now.index or {}
    for prefix_hash, block in index.items():
        view = now.blocks[block]
        if view.state not in (BlockState.SEALED, BlockState.CACHED) or view.prefix_hash != prefix_hash:
            found.append(f"I6: the index has block {block} ({view.state.name}) under a hash that is not its own")
    for i, view in enumerate(now.blocks):
        if view.prefix_hash is not None and index.get(view.prefix_hash) != i:
            found.append(f"I6: block {i} has a hash but the index does not name it")
        if view.state is BlockState.CACHED and view.prefix_hash is None:
            found.append(f"I6: block {i} is cached without a hash")
    return found


def _fencing(ledger: LedgerScripts, now: Inspection) -> list[str]:
    if nobody := [holder.epoch for holder in now.holders if not holder.kind]:
        return [f"I5: leases of holders that are gone: {nobody}"]
    live = {str(holder.epoch).encode() for holder in now.holders}
    left: set[bytes] = set()
    for key in ledger.client.scan_iter(f"{ledger.tag}*", count=1000):
        kind, _, epoch = key[len(ledger.tag) :].partition(b":")
        if kind in (b"own", b"holder"):
            left.add(epoch)
    if dead := left - live:
        return [f"I5: keys of holders that are not live: {sorted(dead)}"]
    if floors := set(now.floors or ()) - {holder.epoch for holder in now.holders}:
        return [f"I5: floors of holders that are not live: {sorted(floors)}"]
    return []
