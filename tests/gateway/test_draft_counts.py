"""The counters of speculation reach /metrics under both names, one series for each worker."""

from __future__ import annotations

from common import convert
from common.types import DraftCounts, WorkerLoad
from gateway.metrics import Metrics


def test_draft_counts_of_workers_are_shown_under_both_names() -> None:
    load = WorkerLoad(num_running=2, drafts=DraftCounts(3, 12, (3, 2, 0)))
    assert convert.load_from_pb(convert.load_to_pb(load)) == load
    assert convert.load_from_pb(convert.load_to_pb(WorkerLoad())).drafts is None
    metrics = Metrics("tiny")
    assert "spec_decode_num_drafts_total{" not in metrics.render().decode()
    assert load.drafts is not None
    metrics.set_drafts({"decode-0": load.drafts})
    text = metrics.render().decode()
    for prefix in ("looseleaf_", "vllm:"):
        labels = '{model_name="tiny",worker="decode-0"}'
        assert f"\n{prefix}spec_decode_num_drafts_total{labels} 3.0" in text
        assert f"\n{prefix}spec_decode_num_draft_tokens_total{labels} 12.0" in text
        assert f"\n{prefix}spec_decode_num_accepted_tokens_total{labels} 5.0" in text
        at = '{model_name="tiny",position="1",worker="decode-0"}'
        assert f"\n{prefix}spec_decode_num_accepted_tokens_per_pos_total{at} 2.0" in text
    metrics.set_drafts({})
    assert "worker=" not in metrics.render().decode()
