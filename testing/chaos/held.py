"""Counts the blocks that the ledger still records for an incarnation of a worker some seconds after its end."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from block_store.ledger.inspection import HolderView, Inspection
from common.types import BlockRef
from testing.chaos.report import Report
from testing.chaos.stack import Stack

AFTER_S = 9.0
"""The time in seconds from a death to the check: a lease of 5 s and a sweep of 0.5 s, with a margin."""
MERCY_S = 0.0
"""Additional seconds in which blocks may be released, for machines that pause."""


@dataclass(frozen=True, slots=True)
class Left:
    """The numbers of blocks that remain unavailable although no live worker uses them."""

    by_the_dead: int
    in_tickets: int
    """The number of blocks in tickets that existed at the death and still exist at the check."""


class HeldAfter:
    """A checker that reads the ledger AFTER_S seconds after each death."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._looks: list[threading.Thread] = []
        self.left: list[Left] = []

    def died(self, moment: float, dead: HolderView) -> None:
        """Starts the check of an incarnation that ended, or woke up, at `moment` (`time.monotonic()`)."""
        tickets = {h.epoch: set(h.own) for h in self._stack.inspect().holders if h.kind == "ticket"}
        look = threading.Thread(target=self._look, args=(moment + AFTER_S, dead, tickets), daemon=True)
        look.start()
        self._looks.append(look)

    def _look(self, at: float, dead: HolderView, tickets: dict[int, set[BlockRef]]) -> None:
        time.sleep(max(0.0, at - time.monotonic()))
        now = self._stack.inspect()
        while held_by(now, dead) and time.monotonic() < at + MERCY_S:
            time.sleep(0.5)
            now = self._stack.inspect()
        still = {h.epoch for h in now.holders}
        self.left.append(Left(held_by(now, dead), sum(len(refs) for e, refs in tickets.items() if e in still)))

    def tell(self, report: Report) -> None:
        """Waits for the last check, and then adds the results of all checks to the report."""
        for look in self._looks:
            look.join()
        guilty = sum(left.by_the_dead > 0 for left in self.left)
        report.none(f"dead that hold blocks {AFTER_S:g} s after", guilty, len(self._looks), "deaths")
        report.told("  blocks in unclaimed tickets at that time", str(sum(left.in_tickets for left in self.left)))


def held_by(now: Inspection, dead: HolderView) -> int:
    """Returns the number of references that an incarnation holds, plus the number of blocks in quarantine that wait for
    its writer slot.
    """
    references = sum(dead.epoch in block.holders for block in now.blocks)
    return references + sum(slot == dead.writer_slot for _, slot in now.quarantine)
