"""The findings of a scenario, as a table. A count of zero comes with an upper bound of the rate, 3/n for n trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table, which contains one finding."""

    what: str
    found: str
    wanted: str
    """The limit. If it is empty, the row is reported but not judged."""
    good: bool = True


@dataclass(slots=True)
class Report:
    """The findings of one scenario."""

    scenario: str
    trials: int
    seed: int
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return all(row.good for row in self.rows)

    def none(self, what: str, events: int, trials: int, of: str) -> None:
        """Adds a row for the number of `events` in `trials`, which must be zero. If it is zero, the row also shows an
        upper bound of the rate with 95 % confidence (the rule of three).
        """
        self.rows.append(Row(what, f"{events} of {trials:,} {of}{bound(events, trials)}", "0", events == 0))

    def at_most(self, what: str, value: float, limit: float, unit: str) -> None:
        self.rows.append(Row(what, f"{value:.3g} {unit}", f"<= {limit:g} {unit}", value <= limit))

    def at_least(self, what: str, value: float, limit: float, unit: str = "") -> None:
        self.rows.append(Row(what, f"{value:,.6g} {unit}".rstrip(), f">= {limit:g} {unit}".rstrip(), value >= limit))

    def exactly(self, what: str, value: int, wanted: int) -> None:
        self.rows.append(Row(what, f"{value:,}", f"= {wanted:,}", value == wanted))

    def told(self, what: str, found: str) -> None:
        self.rows.append(Row(what, found, ""))

    def text(self) -> str:
        head = f"{self.scenario}: {self.trials:,} trials, seed {self.seed}, {self.seconds:.0f} s"
        lines = [f"  {_judgement(row):<4} {row.what:<58} {row.found:<44} {row.wanted}".rstrip() for row in self.rows]
        return "\n".join([head, *lines])


def bound(events: int, trials: int) -> str:
    """Returns ", rate < x", with x by the rule of three, or "" if there are events or no trials."""
    return "" if events or not trials else f", rate < {3 / trials:.2g}"


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the value at the position `share` (0 to 1) of the sorted values, or 0 if there are no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _judgement(row: Row) -> str:
    return "" if not row.wanted else "ok" if row.good else "BAD"
