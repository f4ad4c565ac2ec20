"""Presents the result of a load test, from its record, as data, as text, and as HTML with tables and charts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from loadtest.metrics import LATE_S, TIMES, Histogram, Record, Slo, Tally
from loadtest.svg import axis_of, lines

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_STYLE = (
    "<style>#looseleaf{font-family:sans-serif;background:#fff;color:#1a202c;padding:1em 2em}"
    "#looseleaf table{border-collapse:collapse;margin:.5em 0}"
    "#looseleaf td,#looseleaf th{padding:.2em .8em;border-bottom:1px solid #e2e8f0;text-align:right}"
    "#looseleaf div{display:flex;flex-wrap:wrap}#looseleaf svg{flex:0 1 48%;min-width:24em;height:auto}</style>"
)


def figures(record: Record, slo: Slo, unsent: int = 0) -> dict[str, Any]:
    """Returns the figures of a run. Latencies are in milliseconds. Rates are averages per second from the first to the
    last observation. A figure that cannot be computed is None.
    """
    total = record.total
    seconds = max(record.last_s - record.first_s, 0.0) if total.sent else 0.0
    ended = total.answered + sum(total.failed.values())

    def rate(count: int) -> float | None:
        return round(count / seconds, 3) if seconds else None

    return {
        "sent": total.sent, "answered": total.answered, "failed": total.failed, "unsent": unsent,
        "cut": total.cut, "late": total.late, "seconds": round(seconds, 3),
        "requests_per_s": rate(total.answered),
        "tokens_in": total.tokens_in, "tokens_in_per_s": rate(total.tokens_in),
        "tokens_out": total.tokens_out, "tokens_out_per_s": rate(total.tokens_out),
        "times_ms": {name: _times(total.times.get(name, Histogram())) for name in (*TIMES, "late")},
        "slo": {
            "limits_s": slo.limits, "share": slo.share, "good": total.good,
            "attained": round(total.good / ended, 6) if ended else None, "goodput_per_s": rate(total.good),
        },
    }  # fmt: skip


def _times(histogram: Histogram) -> dict[str, float | int | None]:
    count = len(histogram)
    values = {name: histogram.quantile(share) for name, share in QUANTILES.items()}
    values |= {"mean": histogram.total / count if count else math.nan, "max": histogram.most if count else math.nan}
    return {"count": count, **{name: None if math.isnan(s) else round(s * 1e3, 3) for name, s in values.items()}}


def slo_met(found: dict[str, Any]) -> bool:
    """Returns whether enough requests met the limits. If no request has ended, the share that met them counts as 0."""
    return (found["slo"]["attained"] or 0.0) >= found["slo"]["share"]


def text(found: dict[str, Any]) -> str:
    """Returns the figures as lines for a terminal."""
    names = ("count", "mean", *QUANTILES, "max")
    rows = [f"{'ms':10} " + " ".join(f"{name:>10}" for name in names)]
    for name, times in _observed(found).items():
        rows.append(f"{name:10} " + " ".join(f"{_show(times[column]):>10}" for column in names))
    return "\n".join([_counts(found), *rows, *remarks(found)])


def _observed(found: dict[str, Any]) -> dict[str, Any]:
    """Returns the times that apply to the run. "late" does not apply to a closed-loop run."""
    return {name: times for name, times in found["times_ms"].items() if name in TIMES or times["count"]}


def _counts(found: dict[str, Any]) -> str:
    failed = ", ".join(f"{status} {count}" for status, count in sorted(found["failed"].items()))
    return (
        f"{found['sent']} requests sent, {found['answered']} answered, {sum(found['failed'].values())} failed"
        f"{f' ({failed})' if failed else ''} in {found['seconds']:.1f} s: {_show(found['requests_per_s'])} requests/s, "
        f"{_show(found['tokens_in_per_s'])} tokens/s in, {_show(found['tokens_out_per_s'])} tokens/s out"
    )


def remarks(found: dict[str, Any]) -> Iterator[str]:
    """Yields sentences about late, shortened and missing requests, and the verdict on the limits."""
    if found["late"]:
        yield (
            f"The load generator fell behind: {found['late']} of {found['sent']} requests were sent more than "
            f"{LATE_S * 1e3:.0f} ms late, the latest by {_show(found['times_ms']['late']['max'])} ms. "
            "Use more --processes or a lower rate."
        )
    if found["cut"]:
        yield f"{found['cut']} of {found['sent']} requests were shortened to fit the model. --divide makes all shorter."
    if found["unsent"]:
        yield f"{found['unsent']} requests were not sent or not reported: a worker process failed or was lost."
    slo = found["slo"]
    if slo["limits_s"]:
        limits = ", ".join(f"{name} <= {limit:g} s" for name, limit in slo["limits_s"].items())
        attained = "no request" if slo["attained"] is None else f"{slo['attained']:.2%} of the requests"
        yield (
            f"SLO {'met' if slo_met(found) else 'MISSED'} ({limits}): by {attained}, at least {slo['share']:.2%} must; "
            f"goodput {_show(slo['goodput_per_s'])} requests/s"
        )


def _show(value: float | int | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def html(found: dict[str, Any], record: Record, slo: Slo) -> str:
    """Returns the tables and charts as a section of a page."""
    names = ("count", "mean", *QUANTILES, "max")
    times = [[name, *(_show(row[column]) for column in names)] for name, row in _observed(found).items()]
    failed = [[status, str(count)] for status, count in sorted(found["failed"].items())]
    parts = [f"<p>{escape(sentence)}</p>" for sentence in (_counts(found), *remarks(found))]
    parts.append(_table(["ms", *names], times))
    parts += [_table(["failure", "requests"], failed)] if failed else []
    parts += ["<div>", *charts(record, slo), "</div>"]
    return f'<section id="looseleaf">{_STYLE}<h2>Tokens</h2>{"".join(parts)}</section>'


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def series(record: Record, slo: Slo) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Returns the lines of each chart. A line consists of points (seconds since the start, value)."""
    cells = sorted(record.cells.items())
    begin = cells[0][0] if cells else 0
    ends = [(max(start, record.first_s), min(start + record.width_s, record.last_s)) for start, _ in cells]
    widths = [max(end - start, 1.0) for start, end in ends]  # the run covers parts of the first and the last interval
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}

    def line(chart: str, name: str, values: Sequence[float]) -> None:
        points = [(start - begin, value) for (start, _), value in zip(cells, values, strict=True)]
        found.setdefault(chart, {})[name] = [point for point in points if not math.isnan(point[1])]

    def rates(chart: str, name: str, counts: Sequence[int]) -> None:
        line(chart, name, [count / width for count, width in zip(counts, widths, strict=True)])

    tallies = [tally for _, tally in cells]
    rates("requests/s", "sent", [t.sent for t in tallies])
    rates("requests/s", "answered", [t.answered for t in tallies])
    rates("requests/s", "failed", [sum(t.failed.values()) for t in tallies])
    if slo.limits:
        rates("requests/s", "within the limits", [t.good for t in tallies])
    line("requests in flight", "at the end of the interval", list(_in_flight(tallies)))
    rates("tokens/s", "in", [t.tokens_in for t in tallies])
    rates("tokens/s", "out", [t.tokens_out for t in tallies])
    for name in TIMES:
        for label, share in (("p50", 0.5), ("p99", 0.99)):
            line(f"{name}, ms", label, [t.times.get(name, Histogram()).quantile(share) * 1e3 for t in tallies])
    return found


def _in_flight(tallies: Sequence[Tally]) -> Iterator[float]:
    flying = 0
    for tally in tallies:
        flying += tally.sent - tally.answered - sum(tally.failed.values())
        yield flying


def charts(record: Record, slo: Slo) -> Iterator[str]:
    """Yields an SVG image for each chart that has a point."""
    for name, found in series(record, slo).items():
        points = [point for line in found.values() for point in line]
        if points:
            x = axis_of("seconds since the start", [0.0, *(at for at, _ in points)], zero=True)
            yield lines(name, x, axis_of(name, [value for _, value in points], zero=True), found)
