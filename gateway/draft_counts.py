"""Shows the counters of speculative decoding in /metrics, as the workers last reported them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from common.types import DraftCounts

_LABELS = ["model_name", "worker"]


class DraftCollector(Collector):
    """A collector of the workers' draft counts. Each worker that speculates has its own series."""

    def __init__(self, model_name: str) -> None:
        self._model = model_name
        self.by_worker: Mapping[str, DraftCounts] = {}

    def collect(self) -> Iterator[Metric]:
        texts = {
            "num_drafts": "Drafts that were verified",
            "num_draft_tokens": "Tokens of drafts",
            "num_accepted_tokens": "Tokens of drafts that were accepted",
        }
        totals = [CounterMetricFamily(f"looseleaf_spec_decode_{n}", text, labels=_LABELS) for n, text in texts.items()]
        by_position = CounterMetricFamily(
            "looseleaf_spec_decode_num_accepted_tokens_per_pos",
            "Tokens of drafts that were accepted, by their place in the draft",
            labels=[*_LABELS, "position"],
        )
        for worker, counts in self.by_worker.items():
            values = (counts.num_drafts, counts.num_draft_tokens, sum(counts.accepted_by_position))
            for metric, value in zip(totals, values, strict=True):
                metric.add_metric([self._model, worker], value)
            for position, value in enumerate(counts.accepted_by_position):
                by_position.add_metric([self._model, worker, str(position)], value)
        yield from totals
        yield by_position
