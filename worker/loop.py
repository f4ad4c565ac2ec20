"""Handles the errors of a step, for both roles, and applies the reader rule. This code runs in the step thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from itertools import chain
from operator import is_
from typing import Protocol, TypeVar

from block_store.arena.arena import Arena
from block_store.arena.atomics import Expected
from block_store.errors import ArenaError, Fenced, LedgerError, LedgerUnavailable
from block_store.holder.attach import Attached
from engine.model_runner import ModelRunner
from engine.sequence import Step

RETRY_ALLOC_S = 0.005
"""Pause in seconds before a worker again requests blocks that were not available."""
T = TypeVar("T")


class Role(Protocol):
    """The interface of a prefill or decode worker that the loop uses."""

    def work(self) -> bool:
        """Runs one step. Returns whether a step ran. Raises LedgerError or ArenaError if an operation of the ledger or
        the arena fails.
        """

    def start_over(self, reason: str) -> None:
        """Rejects all requests, gives up the worker's blocks, and registers the worker again."""


def guarded_step(role: Role, attached: Attached, logger: logging.Logger) -> bool:
    """Runs one step of `role`, and handles the errors of the ledger and the arena. Returns whether a step ran."""
    try:
        if attached.is_fenced:
            raise Fenced("while idle, or between two steps")
        return role.work()
    except Fenced:
        role.start_over("the worker's lease had expired")
    except LedgerUnavailable as error:  # nothing is lost: `HeldBlocks` continues without the ledger as long as possible
        logger.warning("a step ended early: %s", error)
    except (LedgerError, ArenaError) as error:
        logger.error("the ledger or the arena reported an error: %s", error)
        role.start_over("the ledger refused an operation")
    return False


def guarded_run(run: Callable[[], None], fail: Callable[[], None], runner: ModelRunner, logger: logging.Logger) -> None:
    """Calls `run`, the computation of a step. Does not catch a LedgerError or an ArenaError. After any other exception,
    calls `fail`, which fails the requests of the step. If the device is no longer usable or a rank is lost, raises an
    error instead (`ModelRunner.settle`), which ends the step thread.
    """
    try:
        run()
    except (LedgerError, ArenaError):
        raise
    except Exception as error:
        runner.settle(error)
        logger.exception("a step failed")
        fail()


class ReaderRule:
    """Applies the reader rule (docs/design.md, Ledger) to the steps of one worker. The checks of a `Step` are
    prepared once, even if later steps update it in place or have the same block tables (`DecodeRows.lay_out`).
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._step: Step | None = None
        self._arrays: list[object] = []
        """The block tables and generations of this step, whose checks `_expected` contains."""
        self._expected: list[Expected] = []

    def stale_owners(self, owners: Iterable[T], step: Step) -> set[T]:
        """Returns the owners of blocks whose generation in the header differs from the generation in the block table.
        `owners` has one entry per row of the step's block tables.
        """
        tables = list(zip(step.batch.block_tables, step.generations, strict=True))
        if step is not self._step:
            if self._step is None or not all(map(is_, chain(*tables), self._arrays)):
                self._expected = [self._arena.expect(*table) for table in tables]
            self._step, self._arrays = step, list(chain(*tables))
        if all(expected.first_mismatch() is None for expected in self._expected):
            return set()
        check, listed = self._arena.check, list(owners)
        return {owner for table in tables for owner, *row in zip(listed, *table, strict=True) if not check(*row)}
