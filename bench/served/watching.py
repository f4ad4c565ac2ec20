"""Makes a decode worker record its blocks after every step, for benchmarks.

The entry point `watched_decode` calls `install`, then runs the service. No setting of a service enables this. The step
thread does the counting, so a watched worker is a little slower.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass
from functools import wraps
from typing import Any

from bench.served.steps import VARIABLE, StepRecord, count_tables
from common import convert
from decode_svc.worker import DecodeWorker
from engine.model_runner import ModelRunner


@dataclass(slots=True)
class Totals:
    """Counts of copied blocks and received tickets since the start of the process."""

    copied_blocks: int = 0
    num_tickets: int = 0
    ticket_bytes: int = 0
    ticket_blocks: int = 0


def record(worker: Any, totals: Totals) -> StepRecord:
    """Returns the state of a `DecodeWorker` between two steps."""
    sequences = [sequence for group in worker._scheduler.groups() for sequence in group.live]
    load, held = worker._scheduler.load(), worker._attached.held
    counts = count_tables(((s.table, s.num_computed) for s in sequences), worker._block_size)
    return StepRecord(
        time.monotonic_ns(),
        load.num_running,
        load.num_waiting,
        *counts,
        sum(s.num_computed for s in sequences if len(s.table)),
        held.num_held,
        held.num_reserved,
        totals.copied_blocks,
        totals.num_tickets,
        totals.ticket_bytes,
        totals.ticket_blocks,
        asdict(worker._preemption.counts),
    )


def install() -> None:
    """Patches the worker's code in this process. Call this once, before the service's `main`."""
    totals = Totals()
    file = open(os.environ[VARIABLE], "w", buffering=1, encoding="utf-8")  # noqa: SIM115 - open as long as the process

    def write(worker: DecodeWorker) -> None:
        file.write(json.dumps(astuple(record(worker, totals))) + "\n")

    _replace(DecodeWorker, "step", _and_then(DecodeWorker.step, write))
    _replace(ModelRunner, "copy_blocks", _counted_copies(ModelRunner.copy_blocks, totals))
    _replace(convert, "ticket_from_pb", _counted_tickets(convert.ticket_from_pb, totals))


def _and_then(step: Callable[..., Any], write: Callable[[DecodeWorker], None]) -> Callable[..., Any]:
    @wraps(step)
    def both(worker: DecodeWorker) -> Any:
        wait = step(worker)
        write(worker)
        return wait

    return both


def _counted_copies(copy_blocks: Callable[..., Any], totals: Totals) -> Callable[..., Any]:
    @wraps(copy_blocks)
    def counted(runner: ModelRunner, src_ids: Any, dst_ids: Any) -> Any:
        totals.copied_blocks += len(src_ids)
        return copy_blocks(runner, src_ids, dst_ids)

    return counted


def _counted_tickets(ticket_from_pb: Callable[..., Any], totals: Totals) -> Callable[..., Any]:
    @wraps(ticket_from_pb)
    def counted(message: Any) -> Any:
        ticket = ticket_from_pb(message)
        totals.num_tickets += 1
        totals.ticket_bytes += message.ByteSize()
        totals.ticket_blocks += len({ref for branch in ticket.tables for table in branch for ref in table})
        return ticket

    return counted


def _replace(owner: Any, name: str, by: Any) -> None:
    setattr(owner, name, by)
