"""Checks that the ledger in Redis, the header of the arena, and the workers' reports of their blocks agree.

Run `python -m block_store.server.fsck DIRECTORY REDIS_URL`, or `looseleaf fsck`.

Prints the differences. The ledger of a running store changes while it is read in parts, so contradictions within the
ledger, or between the ledger and the header, are printed only if repeated readings find them too
(`invariants.lasting`). A repair is a rebuild (`rebuild`), in which the store builds the ledger from the header, and
workers assert their blocks.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from block_store.arena.arena import Arena
from block_store.arena.header import HeaderState, Memory
from block_store.errors import BlockStoreError, LedgerDamaged, StaleDataset
from block_store.ledger import invariants
from block_store.ledger.inspection import BlockState, BlockView, Inspection, inspect
from block_store.ledger.scripts import LedgerScripts
from block_store.redis.redis_server import open_client

PATIENCE_S = 10.0
"""Maximum time in seconds to wait for an answer from Redis. It is long, because Redis may pause on a busy machine."""
REPORT_WAIT_S = 3.0
"""Maximum time in seconds to wait for the workers' reports. A worker reports after its next beat."""
_READABLE = (BlockState.SEALED, BlockState.CACHED)


@dataclass(frozen=True, slots=True)
class Findings:
    """The result of a comparison of the ledger with the header and the workers."""

    differences: tuple[str, ...]
    silent: tuple[str, ...]
    """Names of workers that have a lease but did not report."""


def fsck(arena: Arena, ledger: LedgerScripts, *, digests: bool = False, wait_s: float = REPORT_WAIT_S) -> Findings:
    """Returns the differences, and the workers that did not report. With `digests`, also compares the blocks' bytes
    with their digests if the blocks are in host memory.

    Raises LedgerUnavailable if Redis does not answer, and StaleDataset if the ledger is being rebuilt. The caller may
    try again.
    """
    blocks = _digests(arena) if digests else ()
    try:
        workers, silent = _ask_workers(ledger, wait_s)
        lasting = invariants.lasting(lambda: _look(arena, ledger))
    except LedgerDamaged as error:
        return Findings((str(error), *blocks), ())
    return Findings((*lasting, *workers, *blocks), silent)


def repair(arena: Arena, ledger: LedgerScripts, timeout_s: float = 15.0) -> bool:
    """Asks the store to rebuild the ledger. Returns whether the store did so in time. Raises LedgerUnavailable if Redis
    does not answer.
    """
    before = arena.rebuild_count
    with suppress(StaleDataset, LedgerDamaged):  # the store's next sweep rebuilds the ledger in any case
        ledger.distrust()
    deadline = time.monotonic() + timeout_s
    while arena.rebuild_count == before and time.monotonic() < deadline:
        time.sleep(0.05)
    return arena.rebuild_count != before


def _look(arena: Arena, ledger: LedgerScripts) -> list[str]:
    moment = inspect(ledger, with_blocks=True)
    return [*invariants.findings(ledger, moment), *_pages(arena, ledger, moment), *_headers(arena, moment)]


def _pages(arena: Arena, ledger: LedgerScripts, moment: Inspection) -> list[str]:
    fixed = arena.fixed
    found = [f"the header names dataset {fixed.dataset}, but fsck was run on {ledger.dataset}"] * (
        fixed.dataset != ledger.dataset
    )
    if moment.counts.total != arena.num_blocks:
        found.append(f"the ledger has {moment.counts.total} blocks, but the arena has {arena.num_blocks}")
    return found


def _headers(arena: Arena, moment: Inspection) -> list[str]:
    found: list[str] = []
    for block, view in enumerate(moment.blocks[: arena.num_blocks]):
        found += [f"block {block} ({view.state.name}): {what}" for what in _header(arena, block, view)]
    return found


def _header(arena: Arena, block: int, view: BlockView) -> list[str]:
    """Returns the contradictions between one block's header and the ledger.

    The header of a block that is neither sealed nor cached may be behind the ledger, because a worker records an
    allocation in the header only after the ledger has made it.
    """
    generation, state = int(arena.generations[block]), int(arena.states[block])
    if view.state not in _READABLE:
        ahead = f"the header is ahead: generation {generation}, the ledger's is {view.generation}"
        return [ahead] if generation > view.generation else []
    if generation != view.generation:
        return [f"the header has generation {generation}, the ledger {view.generation}"]
    if state != HeaderState.SEALED:
        return [f"the header says {HeaderState(state).name}"]
    stored = arena.hashes[block].tobytes()
    if view.prefix_hash is not None and stored != view.prefix_hash:
        return [f"the header has hash {stored.hex()[:16]}, the ledger {view.prefix_hash.hex()[:16]}"]
    return []


def _digests(arena: Arena) -> list[str]:
    """Returns a line for each sealed block whose bytes have changed since it was sealed. Blocks on a GPU have no
    digest.
    """
    found: list[str] = []
    if arena.memory is not Memory.HOST:
        return found
    for block in (arena.states == HeaderState.SEALED).nonzero()[0].tolist():
        generation, digest = int(arena.generations[block]), int(arena.digests[block])
        differs = arena.digest(block) != digest
        if differs and (int(arena.generations[block]), int(arena.states[block])) == (generation, HeaderState.SEALED):
            found.append(f"block {block} (generation {generation}): its bytes have changed since it was sealed")
    return found


def _ask_workers(ledger: LedgerScripts, wait_s: float) -> tuple[list[str], tuple[str, ...]]:
    """Returns the differences that workers report, and the names of workers that did not report."""
    census = secrets.token_hex(8)
    ledger.ask_all(census)
    deadline = time.monotonic() + wait_s
    while True:
        workers = {h.epoch: h.name for h in inspect(ledger).holders if h.kind == "worker"}
        reports = ledger.reports(census)
        silent = tuple(name for epoch, name in workers.items() if epoch not in reports)
        if not silent or time.monotonic() >= deadline:
            break
        time.sleep(0.05)
    found: list[str] = []
    for epoch, (missing, surplus) in reports.items():
        name = workers.get(epoch, f"epoch {epoch}")
        found += [f"{name} believes that it holds block {ref.block}, generation {ref.generation}" for ref in missing]
        found += [f"{name} does not know that it holds block {r.block}, generation {r.generation}" for r in surplus]
    return found, silent


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the check. Returns the exit status: 0 if there are no differences or the ledger was repaired, 1 if there are
    differences, 2 if the check failed, and 3 if there are no differences but a worker did not report.
    """
    parser = argparse.ArgumentParser(
        prog="block_store.server.fsck", description="compare Redis, arena header and workers"
    )
    parser.add_argument("directory", type=Path, help="directory of the arena")
    parser.add_argument("redis_url")
    parser.add_argument("--digests", action="store_true", help="compare the bytes of sealed blocks too")
    parser.add_argument("--repair", action="store_true", help="rebuild the ledger if there are differences")
    options = parser.parse_args(argv)
    try:
        return check(options.directory, options.redis_url, digests=options.digests, and_repair=options.repair)
    except BlockStoreError as error:
        print(f"fsck: {error}", file=sys.stderr)
        return 2


def check(directory: Path, redis_url: str, *, digests: bool, and_repair: bool) -> int:
    """Prints the findings, and returns an exit status as `main` does. Raises BlockStoreError if the check fails."""
    arena = Arena.open(directory)
    ledger = LedgerScripts.attach(open_client(redis_url, lambda: arena.fixed.run_id, PATIENCE_S), arena)
    findings = fsck(arena, ledger, digests=digests)
    for line in findings.differences:
        print(line)
    for name in findings.silent:
        print(f"{name} has a lease but did not report")
    print(f"arena {arena.arena_id}: {arena.num_blocks} blocks, {len(findings.differences)} differences")
    if not findings.differences:
        return 3 if findings.silent else 0
    if and_repair and repair(arena, ledger):
        print("the ledger was rebuilt")
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
