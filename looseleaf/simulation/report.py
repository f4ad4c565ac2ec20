"""Summaries of simulated or measured outcomes, and the search for the fewest workers that meet an SLO."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from looseleaf.simulation.costs import Costs
from looseleaf.simulation.fleet import FleetOptions, simulate
from looseleaf.simulation.outcome import Outcome
from looseleaf.simulation.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class Slo:
    """The limits that a request must meet, and the share of all requests that must meet them (DistServe's goodput)."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf
    """Limit on the mean time of a token after the first."""
    share: float = 0.9

    def attained(self, outcomes: Sequence[Outcome]) -> float:
        """Returns the share of the requests that meet both limits. A refused request does not meet them."""
        met = [not o.refusal and o.ttft_s <= self.ttft_s and o.tpot_s <= self.tpot_s for o in outcomes]
        return sum(met) / len(met)


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run. Times are in seconds; a quantile of no values is NaN."""

    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    tokens_per_s: float
    """Output tokens per second, from the first arrival to the last token. NaN if there are no tokens."""
    num_refused: int

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> Summary:
        served = [outcome for outcome in outcomes if not outcome.refusal]
        ttfts = [outcome.ttft_s for outcome in served]
        gaps = [gap for outcome in served for gap in outcome.gaps_s]
        begin = min(outcome.arrived_s for outcome in outcomes)
        end = max((outcome.token_times[-1] for outcome in served), default=begin)
        tokens = sum(len(outcome.token_times) for outcome in served)
        rate = tokens / (end - begin) if end > begin else math.nan
        first, between = [(quantile(values, 0.5), quantile(values, 0.99)) for values in (ttfts, gaps)]
        return cls(*first, *between, rate, len(outcomes) - len(served))


def quantile(values: Sequence[float], share: float) -> float:
    """Returns the value that follows the lowest `share` of the values, or NaN without values."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else math.nan


@dataclass(frozen=True, slots=True)
class Trial:
    """The numbers of workers per host, and the results with these numbers."""

    prefill: int
    decode: int
    attained: float
    summary: Summary
    both: int = 0
    """Number of processes with both roles, instead of prefill and decode workers."""

    @property
    def workers(self) -> str:
        return f"{self.both}b" if self.both else f"{self.prefill}p{self.decode}d"


def plan(requests: Sequence[TraceRequest], costs: Costs, options: FleetOptions, slo: Slo, most: int) -> Iterator[Trial]:
    """Yields trials with 2, 3, ... workers per host, for each division into prefill and decode. Ends after the first
    number of workers with which the SLO is met, or after `most` workers.
    """
    for total in range(2, most + 1):
        found = []
        for prefill in range(1, total):
            tried = replace(options, prefill=prefill, decode=total - prefill)
            outcomes = simulate(requests, costs, tried)
            found.append(Trial(prefill, total - prefill, slo.attained(outcomes), Summary.of(outcomes)))
            yield found[-1]
        if max(trial.attained for trial in found) >= slo.share:
            return
