"""The times of steps and of the gateway's work, as measured on a real server (`looseleaf.simulation.replay.fit`)."""

from __future__ import annotations

import itertools
import json
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from common.errors import StartupError

Points = tuple[tuple[float, float], ...]


def at(points: Points, x: float) -> float:
    """Returns y at `x`, by linear interpolation between `points`, which ascend in x. The first and the last line
    continue beyond the points, but y is at least 0. With a single point, y is the same everywhere.
    """
    if len(points) == 1:
        return points[0][1]
    place = min(max(1, bisect_left(points, (x,))), len(points) - 1)
    (x0, y0), (x1, y1) = points[place - 1 : place + 1]
    return max(0.0, y0 + (x - x0) * (y1 - y0) / (x1 - x0))


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured times of one model on one machine, in seconds."""

    model: str
    kv_bytes_per_token: int
    prefill: Points
    """Time of a prefill step by its number of tokens, without attention to earlier positions."""
    prefill_position_s: float
    """Time that one token of a chunk adds for each position before it."""
    decode: Points
    """Time from one decode step to the next by the number of sequences, without attention to their positions."""
    decode_position_s: float
    """Time that each position of a running sequence adds to a step."""
    front_s: float = 0.0
    """Time that a request spends outside the workers (client, gateway and calls) until its first token has arrived."""
    hand_over_s: float = 0.0
    """Time from the end of prefill until the decode worker has the group."""
    copy_bytes_per_s: float = 2e9
    """Rate of copies between the arena and host memory."""
    idle_factors: tuple[float, ...] = ()
    """How many times as long prefill takes if the machine was idle before: several measurements, in random order."""
    turns: bool = False
    """Whether workers of the measured host take turns on the same cores."""
    origin: dict[str, Any] = field(default_factory=dict)
    """Date, commit, machine and options of the measurement."""

    def prefill_s(self, chunks: Iterable[tuple[int, int]]) -> float:
        """Returns the time of a step with these chunks (number of earlier positions, number of tokens)."""
        tokens = positions = 0
        for start, count in chunks:
            tokens += count
            positions += count * start + count * count // 2
        return at(self.prefill, tokens) + self.prefill_position_s * positions

    def decode_s(self, num_sequences: int, num_positions: int) -> float:
        """Returns the time of a decode step. `num_positions` is the total number of positions of its sequences."""
        return at(self.decode, num_sequences) + self.decode_position_s * num_positions

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def median(measured: Sequence[Costs]) -> Costs:
    """Returns the median of each value of several measurements of the same model, and all of their idle factors. Their
    points must have the same amounts.
    """

    def middle(of_each: Sequence[Points]) -> Points:
        return tuple((same[0][0], statistics.median(y for _, y in same)) for same in zip(*of_each, strict=True))

    times = ("prefill_position_s", "decode_position_s", "front_s", "hand_over_s")
    values = {name: statistics.median(getattr(costs, name) for costs in measured) for name in times}
    prefill, decode = middle([costs.prefill for costs in measured]), middle([costs.decode for costs in measured])
    idle_factors = tuple(itertools.chain.from_iterable(costs.idle_factors for costs in measured))
    return replace(measured[0], prefill=prefill, decode=decode, idle_factors=idle_factors, **values)


def load(path: Path) -> Costs:
    """Reads a file that `Costs.save` wrote. Raises StartupError if the file cannot be read or is not valid."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise StartupError(f"--costs {path}: {error}") from None
    if not isinstance(found, dict):
        raise StartupError(f"--costs {path}: must be a JSON object")
    try:
        points = {name: _points(found, name) for name in ("prefill", "decode")}
        idle_factors = tuple(float(factor) for factor in found.get("idle_factors") or ())
        costs = Costs(**{**found, **points, "idle_factors": idle_factors})
    except (TypeError, ValueError) as error:
        raise StartupError(f"--costs {path}: {error}") from None
    for name in ("prefill_position_s", "decode_position_s", "front_s", "hand_over_s", "kv_bytes_per_token"):
        value = getattr(costs, name)
        if not isinstance(value, int | float) or not 0 <= value < 1e9:
            raise StartupError(f"--costs {path}: {name} must be a number of at least 0, got {value!r}")
    if not all(0 < factor < 1e9 for factor in costs.idle_factors):
        raise StartupError(f"--costs {path}: idle_factors must be positive numbers")
    return costs


def _points(found: dict[str, Any], name: str) -> Points:
    given: Sequence[Any] = found.get(name) or ()
    points = tuple((float(x), float(y)) for x, y in given)
    xs = [x for x, _ in points]
    if not points or xs != sorted(set(xs)) or any(y < 0 for _, y in points):
        raise ValueError(f"{name} must be pairs (amount, seconds) with ascending amounts and seconds of at least 0")
    return points
