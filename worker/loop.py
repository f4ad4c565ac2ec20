"""The errors that can occur in a step, and their consequences: one `except` ladder for both roles, and the reader rule.

Runs in the step thread. Does not depend on the content of a step.
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
"""Pause before blocks that were not available are requested again."""
T = TypeVar("T")


class Role(Protocol):
    """The interface of a prefill or decode worker that the loop uses."""

    def work(self) -> bool:
        """Runs one step. Returns whether anything ran. Raises LedgerError or ArenaError."""

    def start_over(self, reason: str) -> None:
        """Rejects all work, because the worker no longer owns its blocks, and registers again."""


def guarded_step(role: Role, attached: Attached, logger: logging.Logger) -> bool:
    """Runs one step of `role`, and handles errors of the ledger and the arena. Returns whether anything ran."""
    try:
        if attached.is_fenced:
            raise Fenced("while idle, or between two steps")
        return role.work()
    except Fenced:
        role.start_over("the worker's lease had expired")
    except LedgerUnavailable as error:  # nothing is lost: `HeldBlocks` continues without the ledger as long as possible
        logger.warning("a step ended early: %s", error)
    except (LedgerError, ArenaError) as error:
        logger.error("the ledger refused: %s", error)
        role.start_over("the ledger refused an operation")
    return False


def guarded_run(run: Callable[[], None], fail: Callable[[], None], runner: ModelRunner, logger: logging.Logger) -> None:
    """Runs the computation. After an error in the step itself, only the results of the step are lost (`fail`). An error
    of the device ends the thread; the worker keeps its blocks until its lease has expired and its process has ended.
    Raises LedgerError or ArenaError.
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
    """Applies the reader rule (docs/design.md, Ledger). `owners` has one entry per row of the step. Returns the owners
    that have a block whose generation in the header differs from the one in the block table.
    """
    tables = zip(step.batch.block_tables, step.generations, strict=True)
    stale = [table for table in tables if not arena.check(*table)]
    listed = list(owners) if stale else []
    return {owner for table in stale for owner, *row in zip(listed, *table, strict=True) if not arena.check(*row)}
