"""A decode worker's block tables after one step, counted; written by `watching`, read by the benchmarks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.block_table import BlockTable

VARIABLE = "LOOSELEAF_BENCH_STEPS"
"""The file that a watched worker writes to, one JSON list of a `StepRecord` a line."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A decode worker after one step. Counts of blocks are those of running and waiting groups together."""

    at_ns: int
    """Monotonic clock, the same for all processes of a machine."""
    num_running: int
    """Sequences."""
    num_waiting: int
    table_blocks: int
    """Length of all block tables: blocks if nothing were shared."""
    own_blocks: int
    """Different blocks in these tables."""
    filled_slots: int
    """Token positions of these blocks that hold KV."""
    sequence_tokens: int
    """Positions with KV over all sequences, shared ones for each."""
    held_blocks: int
    """Blocks that the worker counts as used by a sequence."""
    reserve_blocks: int
    """Blocks allocated ahead."""
    copied_blocks: int
    """Blocks copied on write since the start."""
    num_tickets: int
    """Tickets that came since the start."""
    ticket_bytes: int
    """Bytes of their messages."""
    ticket_blocks: int
    """Different blocks of each, added up."""
    preemption: Mapping[str, float]
    """`decode_svc.preemption.PreemptionCounts` since the start."""


def count_tables(tables: Iterable[tuple[BlockTable, int]], block_size: int) -> tuple[int, int, int]:
    """Of (block table, positions with KV) of every sequence: (entries, different blocks, positions filled in these)."""
    blocks: list[Any] = [np.empty(0, np.int32)]
    filled: list[Any] = [np.empty(0, np.int64)]
    for table, num_tokens in tables:
        numbers = np.empty(len(table), np.int32)
        table.copy_to(numbers, np.empty(len(table), np.uint64))
        blocks.append(numbers)
        filled.append(np.clip(num_tokens - block_size * np.arange(len(table)), 0, block_size))
    different, where = np.unique(np.concatenate(blocks), return_inverse=True)
    most = np.zeros(len(different), np.int64)
    np.maximum.at(most, where, np.concatenate(filled))
    return len(where), len(different), int(most.sum())


def read(path: Path) -> list[StepRecord]:
    """What has been written so far."""
    text = path.read_text() if path.exists() else ""
    complete = text[: text.rfind("\n") + 1]
    return [StepRecord(*json.loads(line)) for line in complete.splitlines()]
