"""What a step may run into, and what becomes of it: the one ladder of exceptions of both roles, and the reader rule.

Runs in the step thread. Independent of what a step computes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from block_store.arena.arena import Arena
from block_store.errors import ArenaError, Fenced, LedgerError, LedgerUnavailable
from block_store.holder.attach import Attached
from engine.model_runner import ModelRunner
from engine.sequence import Step

RETRY_ALLOC_S = 0.005
"""Pause before blocks that were unavailable are asked for again."""
T = TypeVar("T")


class Role(Protocol):
    """What a prefill worker and a decode worker have in common for the loop."""

    def work(self) -> bool:
        """One step. Whether anything ran. Errors: LedgerError, ArenaError."""

    def start_over(self, reason: str) -> None:
        """Send everything away, because none of the blocks is ours any more, and register anew."""


def guarded_step(role: Role, attached: Attached, logger: logging.Logger) -> bool:
    """One step of `role`, and whether anything ran."""
    try:
        if attached.is_fenced:
            raise Fenced("while idle, or between two steps")
        return role.work()
    except Fenced:
        role.start_over("the worker's lease was over")
    except LedgerUnavailable as error:  # nothing is lost: `HeldBlocks` goes on without the ledger as far as it can
        logger.warning("a step ended early: %s", error)
    except (LedgerError, ArenaError) as error:
        logger.error("the ledger refused: %s", error)
        role.start_over("the ledger refused an operation")
    return False


def guarded_run(run: Callable[[], None], fail: Callable[[], None], runner: ModelRunner, logger: logging.Logger) -> None:
    """Computes. An error of the step's own costs only what it computed (`fail`). One of the device ends the thread, and
    the blocks stay ours until our lease and our process are over. Errors: LedgerError, ArenaError.
    """
    try:
        run()
    except (LedgerError, ArenaError):
        raise
    except Exception as error:
        runner.settle(error)
        logger.exception("a step failed")
        fail()


def stale_owners(arena: Arena, owners: Iterable[T], step: Step) -> set[T]:
    """The reader rule (docs/design.md, Ledger): of the `owners` of the step's rows, one for each, those that have a
    block whose generation in the header is no longer the one in the block table.
    """
    if arena.check(step.block_table, step.generations):
        return set()
    rows = zip(owners, step.block_table, step.generations, strict=True)
    return {owner for owner, *table in rows if not arena.check(*table)}
