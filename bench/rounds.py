"""Functions for measurements that are repeated in rounds: the order of the arms in a round, and medians of rounds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
D = TypeVar("D", bound="DataclassInstance")


def turned(arms: Sequence[T], number: int) -> list[T]:
    """Returns the arms in the order of round `number`. Each round begins with another arm than the one before."""
    turn = number % len(arms)
    return [*arms[turn:], *arms[:turn]]


def ratio(pairs: Iterable[tuple[float, float]]) -> str:
    """Returns the median, the least and the largest ratio of the second to the first number of each pair, as text."""
    ratios = sorted(after / before for before, after in pairs)
    return f"ratio {statistics.median(ratios):.3f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def medians(runs: Sequence[D]) -> D:
    """Returns a dataclass with the median of each field of `runs`, all of which are numbers."""
    kind = type(runs[0])
    return kind(*(statistics.median(getattr(run, field.name) for run in runs) for field in fields(kind)))
