"""Counts generated tokens and records the times between them, for /metrics.

The tally costs much less than prometheus_client's counters and histograms, which use locks. It must be used only in the
event loop.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

_LABELS = ["model_name"]


class TokenTally(Collector):
    """A collector of the number of generated tokens, and of a histogram of the seconds between a sample's tokens."""

    def __init__(self, model_name: str, bounds_s: Sequence[float]) -> None:
        """`bounds_s` are the upper bounds of the histogram's buckets, in ascending order."""
        self.num_tokens = 0
        self._model = [model_name]
        self._bounds_s = bounds_s
        self._buckets = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def add(self, count: int, since_s: float) -> None:
        """Adds `count` tokens that are sent in one message, `since_s` seconds after the sample's previous message. The
        time is divided equally among the tokens.
        """
        if count:
            self.num_tokens += count
            self._buckets[bisect_left(self._bounds_s, since_s / count)] += count
            self._sum_s += since_s

    def collect(self) -> Iterator[Metric]:
        tokens = CounterMetricFamily("looseleaf_generation_tokens", "Tokens produced", labels=_LABELS)
        tokens.add_metric(self._model, self.num_tokens)
        yield tokens
        times = HistogramMetricFamily("looseleaf_inter_token_latency_seconds", "Time between tokens", labels=_LABELS)
        names = [*map(floatToGoString, self._bounds_s), "+Inf"]
        times.add_metric(self._model, list(zip(names, accumulate(self._buckets), strict=True)), self._sum_s)
        yield times
