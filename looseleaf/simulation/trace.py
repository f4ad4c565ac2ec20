"""Reads traces of requests: arrival times, lengths, and which prompts share a prefix.

A trace is a file in Mooncake's format (JSON lines) or in Azure's (CSV), compressed if its name ends in .xz. Lines that
begin with # are comments.
"""

from __future__ import annotations

import csv
import json
import lzma
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from common.errors import StartupError

MOONCAKE_BLOCK = 512
"""Number of tokens that a hash id of a Mooncake trace stands for, unless the line has a `hash_block_size`."""
_FIRST_TOKEN_ID = 16
"""Smaller ids, which are usually special tokens, are not drawn."""
BlockKey = tuple[int, int]
"""A key for the content of a full block and of everything before it: the id of the run that contains the block's last
token, and the block's index.
"""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request of a trace."""

    at_s: float
    """Arrival, in seconds since the first request."""
    runs: tuple[tuple[int, int], ...]
    """The prompt as runs (id, number of tokens). If two prompts have a run with the same id, they are equal up to the
    end of this run.
    """
    output_len: int

    @property
    def prompt_len(self) -> int:
        return sum(length for _, length in self.runs)

    def token_ids(self, vocab_size: int, seed: int = 0) -> list[int]:
        """Returns a prompt for a real server. The tokens of a run depend on the run's id, the seed and the vocabulary's
        size, and not on other runs.
        """
        first = min(_FIRST_TOKEN_ID, vocab_size - 1)
        drawn: list[int] = []
        for name, length in self.runs:
            rng = random.Random(f"{seed}/{name}")
            drawn += [rng.randrange(first, vocab_size) for _ in range(length)]
        return drawn

    def block_keys(self, block_size: int) -> list[BlockKey]:
        """Returns the key of each full block of the prompt, in order."""
        keys: list[BlockKey] = []
        end = 0
        for name, length in self.runs:
            end += length
            keys += [(name, index) for index in range(len(keys), end // block_size)]
        return keys


def read(
    path: Path, *, count: int | None = None, divisor: float = 1.0, rate: float | None = None
) -> list[TraceRequest]:
    """Returns the first `count` requests of the file, in order of arrival.

    Each length is divided by `divisor`, but is at least 1. `rate` scales the arrival times so that this many requests
    arrive per second on average. Raises StartupError if the file cannot be read, has no requests or has an invalid
    line, or if `rate` is given and several requests all arrive at the same time.
    """
    try:
        opened = lzma.open if path.suffix == ".xz" else open
        with opened(path, "rt", encoding="utf-8") as file:
            lines = [line for line in file if line.strip() and not line.startswith("#")]
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise StartupError(f"trace {path}: {error}") from None
    if not lines:
        raise StartupError(f"trace {path}: has no requests")
    rows = _mooncake(lines[:count]) if lines[0].lstrip().startswith("{") else _azure(lines)
    try:
        found = sorted(_scaled(rows, count, divisor), key=lambda request: request.at_s)
    except ValueError as error:
        raise StartupError(f"trace {path}: {error}") from None
    if not found:
        raise StartupError(f"trace {path}: has no requests")
    return paced(found, rate)


def read_lengths(path: Path, *, divisor: float = 1.0) -> tuple[tuple[int, int], ...]:
    """Returns the prompt and output lengths of a trace's requests, in order of arrival. See `read`."""
    return tuple((request.prompt_len, request.output_len) for request in read(path, divisor=divisor))


def paced(requests: Sequence[TraceRequest], rate: float | None) -> list[TraceRequest]:
    """Returns the requests with arrival times that begin at 0 and, if `rate` is given, have this mean rate per second.
    Raises StartupError if `rate` is given and several requests all arrive at the same time.
    """
    first, last = requests[0].at_s, requests[-1].at_s
    pace = 1.0
    if rate is not None:
        if len(requests) > 1 and last == first:
            raise StartupError("--rate: all requests of the trace arrive at the same time, so they have no rate")
        pace = (len(requests) - 1) / rate / (last - first) if last > first else 1.0
    return [replace(request, at_s=(request.at_s - first) * pace) for request in requests]


def mooncake_line(request: TraceRequest) -> str:
    """Returns a line in Mooncake's format. All runs of the request, except the last one, must have the same length."""
    row: dict[str, Any] = {
        "timestamp": round(request.at_s * 1e3, 3),
        "input_length": request.prompt_len,
        "output_length": request.output_len,
        "hash_ids": [name for name, _ in request.runs],
        "hash_block_size": max(length for _, length in request.runs),
    }
    return json.dumps(row)


@dataclass(frozen=True, slots=True)
class _Row:
    """A request as it is in the file, before its lengths are divided."""

    at_s: float
    prompt_len: int
    output_len: int
    ids: tuple[int, ...]
    id_tokens: int


def _scaled(rows: Iterator[_Row], count: int | None, divisor: float) -> Iterator[TraceRequest]:
    for number, row in enumerate(rows):
        if number == count:
            return
        prompt_len = max(1, round(row.prompt_len / divisor))
        size = max(1, round(row.id_tokens / divisor))
        runs: list[tuple[int, int]] = []
        left = prompt_len
        for name in row.ids[: -(-prompt_len // size)]:
            runs.append((name, min(size, left)))
            left -= runs[-1][1]
        if left:  # lengths were rounded, or the row has fewer ids than its prompt has blocks
            runs.append((-number - 1, left))
        yield TraceRequest(row.at_s, tuple(runs), max(1, round(row.output_len / divisor)))


def _mooncake(lines: Sequence[str]) -> Iterator[_Row]:
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"line {number} must be a JSON object")
        ids = row.get("hash_ids", [])
        if not isinstance(ids, list) or not all(isinstance(name, int) and name >= 0 for name in ids):
            raise ValueError(f"line {number}: hash_ids must be a list of integers of at least 0")
        yield _Row(
            _number(row, "timestamp", number, 0) / 1e3,
            int(_number(row, "input_length", number, 1)),
            int(_number(row, "output_length", number, 0)),
            tuple(ids),
            int(_number({"hash_block_size": MOONCAKE_BLOCK, **row}, "hash_block_size", number, 1)),
        )


def _azure(lines: Sequence[str]) -> Iterator[_Row]:
    rows = csv.DictReader(lines)
    columns = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    missing = [name for name in columns if name not in (rows.fieldnames or ())]
    if missing:
        raise ValueError(f"neither JSON lines nor a CSV with the column {missing[0]}")
    for number, row in enumerate(rows, 2):
        try:
            at_s = datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
        except ValueError:
            raise ValueError(f"line {number}: TIMESTAMP must be a date and time, got {row['TIMESTAMP']!r}") from None
        lengths = [int(_number(row, name, number, least)) for name, least in zip(columns[1:], (1, 0), strict=True)]
        yield _Row(at_s, lengths[0], lengths[1], (), MOONCAKE_BLOCK)


def _number(row: dict[str, Any], name: str, line: int, least: int) -> float:
    try:
        value = float(row[name])
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"line {line}: {name} must be a number of at least {least}, got {row.get(name)!r}") from None
    if not least <= value < 1e15:
        raise ValueError(f"line {line}: {name} must be at least {least}, got {row[name]!r}")
    return value
