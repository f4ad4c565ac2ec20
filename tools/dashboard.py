"""Generates the Grafana dashboard deploy/observe/grafana/looseleaf.json: `python -m tools.dashboard`.

The panels are data (`ROWS`), so that a query can be read, changed and tested without Grafana's JSON. Several gateways
report the same blocks and workers, so `max` combines their gauges.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Any

FILE = Path(__file__).resolve().parents[1] / "deploy" / "observe" / "grafana" / "looseleaf.json"
WIDTH, HEIGHT, PER_ROW = 8, 8, 3
"""The width and height of a panel in Grafana's grid, which has 24 columns, and the number of panels side by side."""
_MODEL = 'model_name=~"$model"'
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression, and the legend of its series. `{{label}}` in the legend is the value of a label."""

    legend: str
    expression: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel with time series. `unit` is one of Grafana's unit names."""

    title: str
    unit: str
    meaning: str
    """The description that the panel shows as a tooltip."""
    queries: Sequence[Query]
    is_stacked: bool = False


def _series(name: str, *labels: str) -> str:
    return f"looseleaf_{name}{{{','.join([_MODEL, *labels])}}}"


def _rate(name: str, *labels: str) -> str:
    return f"rate({_series(name, *labels)}[$__rate_interval])"


def _total(legend: str, name: str) -> Query:
    return Query(legend, f"sum({_rate(name)})")


def _by(label: str, name: str) -> Query:
    return Query(f"{{{{{label}}}}}", f"sum by ({label}) ({_rate(name)})")


def _quantiles(name: str) -> list[Query]:
    buckets = f"sum by (le) ({_rate(f'{name}_bucket')})"
    return [Query(f"p{100 * q:g}", f"histogram_quantile({q}, {buckets})") for q in (0.5, 0.9, 0.99)]


def _mean(legend: str, name: str) -> Query:
    return Query(legend, f"sum({_rate(f'{name}_sum')}) / sum({_rate(f'{name}_count')})")


def _now(legend: str, name: str, aggregate: str) -> Query:
    return Query(legend, f"{aggregate} ({_series(name)})")


_REFERENCED = _series("blocks", 'state=~"reserved|sealed|quarantine"')
ROWS: dict[str, Sequence[Panel]] = {
    "What clients see": (
        Panel(
            "Time to first token", "s", "From the arrival of a request until the text of its first token is sent.",
            _quantiles("time_to_first_token_seconds"),
        ),
        Panel(
            "Inter-token latency", "s", "Time between two messages to a client, per token of the second message.",
            _quantiles("inter_token_latency_seconds"),
        ),
        Panel(
            "Request latency", "s", "From the arrival of a request until its end.",
            _quantiles("e2e_request_latency_seconds"),
        ),
        Panel(
            "Requests ended", "reqps", "By finish reason.", [_by("finished_reason", "requests_ended_total")],
            is_stacked=True,
        ),
        Panel(
            "Tokens", "short", "Tokens per second. Prompt tokens include cached tokens.",
            [_total("prompt", "prompt_tokens_total"), _total("generated", "generation_tokens_total")],
        ),
        Panel(
            "Requests not served", "reqps", "Failed requests by gRPC status, and refused requests by reason.",
            [_by("code", "requests_failed_total"), _by("reason", "requests_refused_total")], is_stacked=True,
        ),
    ),
    "Where the time goes": (
        Panel(
            "Mean time in each phase", "s", "Of requests that ended with stop or length.",
            [
                _mean("queue", "request_queue_time_seconds"), _mean("prefill", "request_prefill_time_seconds"),
                _mean("hand-over", "request_hand_over_time_seconds"), _mean("decode", "request_decode_time_seconds"),
            ],
            is_stacked=True,
        ),
        Panel(
            "Requests in the gateway", "short", "Requests that workers are processing, and requests that wait.",
            [_now("running", "requests_running", "sum"), _now("waiting", "requests_waiting", "sum")],
        ),
        Panel(
            "Predicted wait", "s", "Of a request that arrives now. Beyond --max-queue-wait, requests are refused.",
            [_now("wait", "predicted_wait_seconds", "max")],
        ),
    ),
    "KV blocks": (
        Panel(
            "Blocks by state", "short", "Of all arenas. Cached blocks are free to be evicted.",
            [_now("{{state}}", "blocks", "max by (state)")], is_stacked=True,
        ),
        Panel(
            "KV cache usage", "percentunit", "Share of the blocks that are referenced.",
            [_now("used", "kv_cache_usage_ratio", "max")],
        ),
        Panel(
            "Prefix cache hits", "percentunit", "Share of the prompt tokens that were found in the prefix cache.",
            [Query("hits", f"sum({_rate('prefix_cache_hits_total')}) / sum({_rate('prefix_cache_queries_total')})")],
        ),
        Panel(
            "Hand-overs", "ops", "Tickets submitted to decode workers.", [_total("tickets", "hand_overs_total")],
        ),
        Panel(
            "Copies between hosts", "Bps", "Bytes of blocks that block stores pulled from other hosts.",
            [_total("pulled", "pulled_bytes_total")],
        ),
        Panel(
            "Memory in use", "bytes", "Bytes of the referenced blocks.",
            [Query("referenced", f"sum(max by (state) ({_REFERENCED})) * on () max({_series('block_bytes')})")],
        ),
    ),
    "Workers": (
        Panel(
            "Sequences in the batch", "short", "By worker.", [_now("{{worker}}", "worker_running", "max by (worker)")],
        ),
        Panel(
            "Sequences queued by a worker", "short", "By worker.",
            [_now("{{worker}}", "worker_waiting", "max by (worker)")],
        ),
        Panel("Requests sent to a worker", "reqps", "By worker.", [_by("worker", "worker_requests_total")]),
    ),
    "Faults": (
        Panel(
            "Attempts that were lost", "ops", "By reason. The clients saw a pause, and the same tokens.",
            [_by("reason", "requests_retried_total")], is_stacked=True,
        ),
        Panel(
            "Groups given back", "ops", "Preempted by decode and prefilled again.",
            [_total("given back", "requests_given_back_total")],
        ),
        Panel(
            "Fallbacks", "short", "Number of times that a process used a slower substitute for its normal path.",
            [_now("{{service}}: {{fallback}}", "fallbacks", "max by (service, fallback)")],
        ),
    ),
}  # fmt: skip


def panels() -> Iterator[Panel]:
    """Yields the panels of all rows."""
    for row in ROWS.values():
        yield from row


def dashboard() -> dict[str, Any]:
    """Returns the dashboard as Grafana's JSON model (schema version 39, Grafana 11)."""
    return {
        "uid": "looseleaf",
        "title": "Looseleaf",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_datasource_variable(), _model_variable()]},
        "panels": list(_placed()),
    }


def _datasource_variable() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}


def _model_variable() -> dict[str, Any]:
    return {
        "name": "model",
        "type": "query",
        "label": "Model",
        "datasource": _DATASOURCE,
        "query": {"query": "label_values(looseleaf_requests_running, model_name)", "refId": "model"},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".+",
        "current": {"text": "All", "value": "$__all"},
    }


def _placed() -> Iterator[dict[str, Any]]:
    """Yields the rows and panels with their ids and places in the grid."""
    number = y = 0
    for title, row in ROWS.items():
        number += 1
        yield {
            "id": number, "type": "row", "title": title, "collapsed": False, "panels": [],
            "gridPos": {"x": 0, "y": y, "w": WIDTH * PER_ROW, "h": 1},
        }  # fmt: skip
        y += 1
        for place, panel in enumerate(row):
            number += 1
            x, line = place % PER_ROW * WIDTH, place // PER_ROW
            yield _panel(panel, number, {"x": x, "y": y + line * HEIGHT, "w": WIDTH, "h": HEIGHT})
        y += -(-len(row) // PER_ROW) * HEIGHT


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    stacking = {"mode": "normal" if panel.is_stacked else "none"}
    custom = {"fillOpacity": 30 if panel.is_stacked else 0, "showPoints": "never", "stacking": stacking}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.meaning,
        "datasource": _DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": letter, "datasource": _DATASOURCE, "expr": query.expression, "legendFormat": query.legend}
            for letter, query in zip(ascii_uppercase, panel.queries, strict=False)
        ],
    }  # fmt: skip


def text() -> str:
    """Returns the text of the dashboard's file."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
