"""Computes medians from measurements, and the ratios for which there are goals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

BOTH, SPLIT = "looseleaf-both", "looseleaf-split"
PEERS = ("vllm", "llamacpp", "openvino")
SERVERS = ("vllm", "llamacpp")
"""The peers that answer over HTTP. OpenVINO runs inside the client's process."""
QUANTIZED = {"int8": ("looseleaf-int8", "llamacpp-q8"), "int4": ("looseleaf-int4", "llamacpp-q4")}
"""Our server with `--quantization`, and llama.cpp's with the same model in Q8_0 or Q4_0, by the value of the flag."""
UNQUANTIZED = "looseleaf-bfloat16"
"""Our server with unquantized weights, in the rounds with quantized weights."""
MEASURES = (
    "tok_s",
    "out_tok_s",
    "ttft_p50",
    "ttft_p99",
    "itl_p50",
    "itl_p99",
    "tpot_p50",
    "worst_ms",
    "usual_ms",
    "pss_mib",
)

Key = tuple[str, str, str]
"""(model, test, peer)."""
Medians = Mapping[Key, Mapping[str, float]]
"""The median of each measure over the repetitions, and their number as "reps"."""
Repetitions = Mapping[Key, Sequence[Mapping[str, Any]]]
"""The rows of the repetitions. A row contains "round" if it was measured in a round with other targets."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal for a ratio ours / theirs. `wanted` is the smallest acceptable ratio, or the largest acceptable ratio for
    measures where lower is better.
    """

    what: str
    test: str
    measure: str
    wanted: float
    sense: Literal["least", "most"] = "least"
    ours: str = BOTH
    others: Sequence[str] = PEERS
    size: str = "M"


GOALS = (
    Goal("prefill 1 x 1024", "prefill1", "tok_s", 1.0),
    Goal("prefill 8 x 512", "prefill8", "tok_s", 1.0),
    Goal("decode batch 1, against llama.cpp", "decode1", "tok_s", 0.97, others=("llamacpp",)),
    Goal("decode batch 8", "decode8", "tok_s", 1.4),
    Goal("decode batch 32", "decode32", "tok_s", 1.6),
    Goal("served, colocated", "served", "out_tok_s", 1.2),
    Goal("served, split against colocated", "served", "out_tok_s", 0.9, ours=SPLIT, others=(BOTH,)),
    Goal("served, TTFT p99, against servers", "served", "ttft_p99", 1.0, "most", others=SERVERS),
    Goal("shared prefix", "prefix", "out_tok_s", 1.3),
    Goal("served S, against vLLM", "served", "out_tok_s", 1.2, others=("vllm",), size="S"),
    Goal("worst gap under a long prompt, colocated", "gap", "worst_ms", 0.15, "most", others=("vllm",)),
    Goal("worst gap under a long prompt, split", "gap", "worst_ms", 0.15, "most", ours=SPLIT, others=("vllm",)),
    Goal("against transformers, one by one", "served", "out_tok_s", 8.3, others=("transformers-alone",)),
    Goal("against transformers, static 16", "served", "out_tok_s", 24.0, others=("transformers-static",)),
    Goal("against transformers, continuous", "served", "out_tok_s", 1.0, others=("transformers",)),
    *(
        Goal(f"decode batch {size}, {bits}, against {peer}", f"decode{size}", "tok_s", 1.0, ours=ours, others=(peer,))
        for bits, (ours, peer) in QUANTIZED.items()
        for size in (1, 8, 32)
    ),
    *(
        Goal(f"decode batch 1, {bits}, against bfloat16", "decode1", "tok_s", wanted, ours=ours, others=(UNQUANTIZED,))
        for (bits, (ours, _)), wanted in zip(QUANTIZED.items(), (1.7, 2.5), strict=True)
    ),
)


@dataclass(frozen=True, slots=True)
class Figure:
    """The result for a goal. `ours` and `theirs` are medians of all repetitions. `ratio` is the median of the ratios of
    the rounds, since the machine may change its speed between rounds. `ratio` is None if our server or the peer was
    not measured, or if the goal has no peer.
    """

    what: str
    wanted: str
    ours: float | None
    theirs: float | None
    peer: str | None
    ratio: float | None
    holds: bool | None


def repetitions(rows: Iterable[Mapping[str, Any]]) -> Repetitions:
    """Returns the rows by model, test and peer. Disturbed repetitions are included."""
    found: dict[Key, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["model"].split("-")[0], row["test"], row["peer"]), []).append(row)
    return found


def medians(found: Repetitions) -> dict[Key, dict[str, float]]:
    return {key: _median_row(same) for key, same in found.items()}


def _median_row(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    numbers = {name: [row[name] for row in rows if row.get(name) is not None] for name in MEASURES}
    values = {name: round(statistics.median(given), 2) for name, given in numbers.items() if given}
    return {**values, "reps": len(rows)}


def figures(found: Repetitions, size: str = "M") -> list[Figure]:
    """Returns the results for all goals. `size` is the model that replaces M in a rehearsal."""
    return [figure(replace(goal, size=size) if goal.size == "M" else goal, found) for goal in GOALS]


def figure(goal: Goal, found: Repetitions) -> Figure:
    """Returns the result for a goal, with the peer whose ratio is the least favourable to us."""

    def values(peer: str) -> dict[int, float]:
        """Returns the values by round, or by their position if they were not measured in rounds."""
        rows = enumerate(found.get((goal.size, goal.test, peer), ()))
        return {row.get("round", at): row[goal.measure] for at, row in rows if row.get(goal.measure) is not None}

    wanted = f"{'>=' if goal.sense == 'least' else '<='} {goal.wanted:g}"
    ours, others = values(goal.ours), {peer: given for peer in goal.others if (given := values(peer))}
    if not ours or not others:
        return Figure(goal.what, wanted, _median(ours), None, None, None, None)
    worst = min if goal.sense == "least" else max
    ratio, peer = worst((_ratio(ours, given), peer) for peer, given in others.items())
    holds = ratio >= goal.wanted if goal.sense == "least" else ratio <= goal.wanted
    return Figure(goal.what, wanted, _median(ours), _median(others[peer]), peer, round(ratio, 3), holds)


def _ratio(ours: Mapping[int, float], theirs: Mapping[int, float]) -> float:
    """Returns the median of the rounds' ratios, or the ratio of the medians if not both were measured in the same
    rounds.
    """
    if ours.keys() == theirs.keys():
        pairs = [(ours[at], theirs[at]) for at in ours]
    else:
        pairs = [(statistics.median(ours.values()), statistics.median(theirs.values()))]
    return statistics.median(mine / other if other else math.inf for mine, other in pairs)


def _median(values: Mapping[int, float]) -> float | None:
    return round(statistics.median(values.values()), 2) if values else None


def absolute(what: str, value: float | None, most: float, unit: str) -> Figure:
    """Returns the result for a limit that concerns only our server."""
    holds = None if value is None else value <= most
    return Figure(what, f"<= {most:g} {unit}", value, None, None, None, holds)


def disturbed(rows: Iterable[Mapping[str, Any]], share: float = 0.2) -> tuple[int, int]:
    """Returns (number of repetitions in which other processes used more than `share` of a core, number of repetitions
    in which this was measured).
    """
    told = [other for row in rows for other in row.get("other_cores", ()) if other is not None]
    return sum(other > share for other in told), len(told)


def table(given: Sequence[Figure]) -> str:
    """Returns the results as a Markdown table."""
    lines = ["| | ours | best of the others | ratio | wanted | holds |", "|---|---|---|---|---|---|"]
    for item in given:
        theirs = "not measured" if item.theirs is None else f"{item.theirs:g} ({item.peer})"
        holds = {None: "?", True: "yes", False: "**no**"}[item.holds]
        if item.theirs is None and item.peer is None and item.holds is not None:
            theirs = ""
        lines.append(
            f"| {item.what} | {_shown(item.ours)} | {theirs} | {_shown(item.ratio)} | {item.wanted} | {holds} |"
        )
    return "\n".join(lines)


def medians_table(found: Medians) -> str:
    """Returns a table of all medians, including those without a goal."""
    lines = [
        "| model | test | who | reps | tok/s | TTFT p50 / p99 ms | ITL p50 / p99 ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for (model, test, peer), row in sorted(found.items()):
        rate = _shown(row.get("tok_s", row.get("out_tok_s")))
        pairs = [f"{_shown(row.get(f'{name}_p50'))} / {_shown(row.get(f'{name}_p99'))}" for name in ("ttft", "itl")]
        if test == "gap":
            rate, pairs = "", ["", f"{_shown(row['usual_ms'])} / worst {_shown(row['worst_ms'])}"]
        cells = (model, test, peer, f"{row['reps']:g}", rate, *(" " if cell == " / " else cell for cell in pairs))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def rows_of(given: Sequence[Figure]) -> list[dict[str, Any]]:
    return [asdict(item) for item in given]


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"
