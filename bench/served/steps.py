"""Defines the records of a decode worker's blocks after each step, which `watching` writes and benchmarks read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.block_table import BlockTable

VARIABLE = "LOOSELEAF_BENCH_STEPS"
"""The environment variable with the path of a watched worker's records, one line of JSON per `StepRecord`."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The state of a decode worker after a step. Block counts include running and waiting groups."""

    at_ns: int
    """The time on the monotonic clock, which is the same for all processes on a machine."""
    num_running: int
    """The number of running sequences."""
    num_waiting: int
    table_blocks: int
    """The total length of all block tables, which is the number of blocks without sharing."""
    own_blocks: int
    """The number of different blocks in all block tables."""
    filled_slots: int
    """The number of token positions that have KV, over the different blocks of all block tables."""
    sequence_tokens: int
    """The number of positions with KV over all sequences. Shared positions count once per sequence."""
    held_blocks: int
    """The number of blocks that the worker counts as used by sequences."""
    reserve_blocks: int
    """The number of blocks allocated in advance."""
    copied_blocks: int
    """The number of blocks copied on write since the start."""
    num_tickets: int
    """The number of tickets received since the start."""
    ticket_bytes: int
    """The size in bytes of the messages of all tickets received since the start."""
    ticket_blocks: int
    """The number of different blocks in each ticket, summed over all tickets."""
    preemption: Mapping[str, float]
    """The counts of `decode_svc.preemption.PreemptionCounts` since the start."""


def count_tables(tables: Iterable[tuple[BlockTable, int]], block_size: int) -> tuple[int, int, int]:
    """Counts the blocks in `tables`, which has (block table, number of positions with KV) for every sequence. Returns
    (entries, different blocks, positions with KV in these blocks).
    """
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
    """Returns all records written so far."""
    text = path.read_text() if path.exists() else ""
    complete = text[: text.rfind("\n") + 1]
    return [StepRecord(*json.loads(line)) for line in complete.splitlines()]
