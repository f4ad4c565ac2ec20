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

_STARTS = ("warm", "idle", "beside")
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
class Start:
    """The times of a single request up to its second token."""

    num_tokens: int
    """Length of the prompt."""
    prefill_s: float
    front_s: float
    hand_over_s: float
    """As in `Costs`."""


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
    warm: tuple[Start, ...] = ()
    """Measurements of requests that followed one another, in random order."""
    idle: tuple[Start, ...] = ()
    """Measurements of requests before which the machine was idle, in random order."""
    beside: tuple[Start, ...] = ()
    """Measurements of requests that arrived while another was decoded. Their `front_s` has no wait for a turn."""
    turn_s: float = 0.0
    """Time that passes when prefill and decode change turns."""
    late_s: tuple[float, ...] = ()
    """Times by which tokens reached the client later than if they had come at equal distances; negative: earlier. The
    tokens of a request follow one another.
    """
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
    """Returns the median of each value of several measurements of the same model, and all of their single requests.
    Their points must have the same amounts.
    """

    def middle(of_each: Sequence[Points]) -> Points:
        return tuple((same[0][0], statistics.median(y for _, y in same)) for same in zip(*of_each, strict=True))

    times = ("prefill_position_s", "decode_position_s", "front_s", "hand_over_s", "turn_s")
    values = {name: statistics.median(getattr(costs, name) for costs in measured) for name in times}
    prefill, decode = middle([costs.prefill for costs in measured]), middle([costs.decode for costs in measured])
    singles: dict[str, Any] = {
        name: tuple(itertools.chain.from_iterable(getattr(costs, name) for costs in measured))
        for name in (*_STARTS, "late_s")
    }
    return replace(measured[0], prefill=prefill, decode=decode, **values, **singles)


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
        starts = {name: tuple(Start(**start) for start in found.get(name) or ()) for name in _STARTS}
        late_s = tuple(float(seconds) for seconds in found.get("late_s") or ())
        costs = Costs(**{**found, **points, **starts, "late_s": late_s})
    except (TypeError, ValueError) as error:
        raise StartupError(f"--costs {path}: {error}") from None
    times = ("prefill_position_s", "decode_position_s", "front_s", "hand_over_s", "turn_s")
    for name in (*times, "kv_bytes_per_token"):
        value = getattr(costs, name)
        if not isinstance(value, int | float) or not 0 <= value < 1e9:
            raise StartupError(f"--costs {path}: {name} must be a number of at least 0, got {value!r}")
    for name in _STARTS:
        for start in getattr(costs, name):
            if not all(isinstance(value, int | float) and 0 <= value < 1e9 for value in asdict(start).values()):
                raise StartupError(f"--costs {path}: {name} must have numbers of at least 0, got {start!r}")
    if not all(-1e9 < seconds < 1e9 for seconds in costs.late_s):
        raise StartupError(f"--costs {path}: late_s must be numbers of seconds")
    return costs


def _points(found: dict[str, Any], name: str) -> Points:
    given: Sequence[Any] = found.get(name) or ()
    points = tuple((float(x), float(y)) for x, y in given)
    xs = [x for x, _ in points]
    if not points or xs != sorted(set(xs)) or any(y < 0 for _, y in points):
        raise ValueError(f"{name} must be pairs (amount, seconds) with ascending amounts and seconds of at least 0")
    return points
