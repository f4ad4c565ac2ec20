"""Compares three arrangements of the roles under three workloads (`python -m bench.served.disaggregation`).

`split` serves every prompt in one process and its tokens in another, `both` serves a request in one process, and
`adaptive` decides for each request. All arrangements have equally many processes, with one thread each. First, two
processes serve the workloads on this machine, and the arrangements take turns. Then larger fleets are simulated, with
step times that were measured before the first and after the last of these runs. The simulated `split` is the best of
three divisions.

A request counts as good if it meets the limits on TTFT and on the mean time per later token. Regret is the share of the
better fixed arrangement's goodput or throughput that `adaptive` lacks. The last line is JSON.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from pydantic import Field

from bench.rounds import medians, turned
from bench.served.machine import provenance
from bench.served.simulated import LONGEST, MAX_MODEL_LEN, MODEL, NUM_BLOCKS
from common.errors import StartupError
from common.settings import Settings, settings_config
from engine.config import ModelConfig
from gateway.fleet.sharing import Targets
from looseleaf.llm import LLM
from looseleaf.serve.model_source import resolve
from looseleaf.simulation import costs as cost_files
from looseleaf.simulation import replay
from looseleaf.simulation.costs import Costs, median
from looseleaf.simulation.fleet import FleetOptions, simulate
from looseleaf.simulation.outcome import Outcome
from looseleaf.simulation.report import Slo, Summary
from looseleaf.simulation.trace import TraceRequest
from looseleaf.simulation.worker import WorkerOptions

ARRANGEMENTS = ("split", "both", "adaptive")
PREFIX_LEN = 192
BATCH = 8
"""Number of sequences in the batches whose steps are assumed when a load is converted to a rate."""
Request = tuple[tuple[tuple[int, int], ...], int]
"""The runs of a prompt (`TraceRequest.runs`) and the length of the output."""


class DisaggregationSettings(Settings):
    """The settings of the comparison."""

    model_config = settings_config("LOOSELEAF_DISAGGREGATION_", "bench.served.disaggregation")

    model: str = Field(str(MODEL), description="model directory; its weights are random")
    rounds: int = Field(3, ge=0, description="times that each arrangement serves each workload; 0: only simulate")
    seconds: float = Field(25.0, gt=0, description="time in which the requests of a workload arrive")
    offered: float = Field(0.6, gt=0, description="offered work, as a share of the time of all processes")
    slo_ttft: float = Field(1.5, gt=0, description="limit on the time to first token, in seconds")
    slo_tpot: float = Field(0.03, gt=0, description="limit on the mean time per later token, in seconds")
    fleets: list[int] = Field([2, 8, 32], description="numbers of processes of the simulated fleets")
    costs: Path | None = Field(
        None, description="file for the measured step times; with --rounds 0, it must exist and is read"
    )


def long_prompts(rng: random.Random, number: int) -> Request:
    return ((number, rng.randint(512, 1000)),), rng.randint(8, 24)


def long_outputs(rng: random.Random, number: int) -> Request:
    return ((number, rng.randint(16, 64)),), rng.randint(96, 200)


def mixed(rng: random.Random, number: int) -> Request:
    """Returns a prompt that begins with one of four common prefixes; two in five have a long rest."""
    prefix = (-1 - rng.randrange(4), PREFIX_LEN)
    if rng.random() < 0.4:
        return (prefix, (number, rng.randint(300, 760))), rng.randint(16, 48)
    return (prefix, (number, rng.randint(16, 128))), rng.randint(64, 160)


WORKLOADS: dict[str, tuple[Callable[[random.Random, int], Request], bool]] = {
    "long prompts": (long_prompts, False),
    "long outputs": (long_outputs, False),
    "mixed bursts": (mixed, True),
}
"""The requests of each workload, and whether they arrive in bursts."""


def trace(name: str, costs: Costs, processes: int, settings: DisaggregationSettings, seed: int) -> list[TraceRequest]:
    """Returns the requests of a workload at the rate that offers `settings.offered`. Bursts arrive at three times the
    rate.
    """
    draw, is_bursty = WORKLOADS[name]
    rng = random.Random(f"{name}/{seed}")
    drawn = [draw(rng, number) for number in range(1, 20_000)]
    rate = settings.offered * processes / statistics.fmean(work_s(request, costs) for request in drawn[:500])
    requests: list[TraceRequest] = []
    at_s, left = 0.0, 0
    for runs, output_len in drawn:
        if is_bursty and not left:
            left = rng.randint(4, 4 + 4 * processes)
            at_s += left * 2 / 3 / rate  # the pause, in which no request arrives
        at_s += rng.expovariate(3 * rate if is_bursty else rate)
        left -= is_bursty
        if at_s > settings.seconds:
            return requests
        requests.append(TraceRequest(at_s, runs, output_len))
    raise StartupError(f"--seconds {settings.seconds:g}: more than {len(drawn):,} requests of {name!r} would arrive")


def work_s(request: Request, costs: Costs) -> float:
    """Returns the time for which a request occupies a process whose batch has `BATCH` sequences."""
    runs, output_len = request
    missing = sum(length for name, length in runs if name > 0)
    length = sum(length for _, length in runs)
    return costs.prefill_s([(length - missing, missing)]) + output_len * costs.decode_s(BATCH, BATCH * length) / BATCH


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one run, or the medians of several. Times are in seconds."""

    good_per_s: float
    """Requests per second that meet both limits."""
    tokens_per_s: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    good_share: float
    num_refused: float

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], slo: Slo) -> Figures:
        found, share = Summary.of(outcomes), slo.attained(outcomes)
        ends = [outcome.token_times[-1] for outcome in outcomes if not outcome.refusal]
        seconds = max(ends, default=math.nan) - min(outcome.arrived_s for outcome in outcomes)
        return cls(
            share * len(outcomes) / seconds, found.tokens_per_s, found.ttft_p50, found.ttft_p99, found.itl_p50,
            found.itl_p99, share, found.num_refused,
        )  # fmt: skip


Results = dict[str, dict[str, Figures]]
"""The figures by workload and arrangement."""


def served(settings: DisaggregationSettings, roles: str, processes: int = 2) -> LLM:
    """Starts processes with one thread each: `processes` with both roles, or half as many of each role."""
    workers = processes // 2 if roles == "split" else processes
    limits: dict[str, Any] = (
        {"slo_ttft": settings.slo_ttft, "slo_itl": settings.slo_tpot} if roles == "adaptive" else {}
    )
    return LLM(
        settings.model, max_model_len=MAX_MODEL_LEN, num_blocks=NUM_BLOCKS, load_format="dummy", spare=0, threads=1,
        roles=roles, prefill=workers, decode=workers, **limits,
    )  # fmt: skip


def fit(settings: DisaggregationSettings, config: ModelConfig, seed: int) -> Costs:
    directory = resolve(settings.model, dummy=True).directory
    kv_bytes = replay.kv_bytes_per_token(directory)
    with served(settings, "both", processes=1) as llm:
        fitted = replay.fit(llm.addresses.grpc, directory.name, kv_bytes, config.vocab_size, LONGEST, seed)
        return asyncio.run(fitted)


def measure(settings: DisaggregationSettings, costs: Costs, vocab_size: int, slo: Slo) -> Results:
    """Serves all workloads in all arrangements, in each round in another order. Returns the medians of the rounds."""
    runs: dict[tuple[str, str], list[Figures]] = {}
    for number in range(settings.rounds):
        for roles in turned(ARRANGEMENTS, number):
            with served(settings, roles) as llm:
                warm_up = [TraceRequest(0.0, ((-100 - n, 600),), 16) for n in range(6)]
                asyncio.run(replay.replay(llm.addresses.grpc, warm_up, vocab_size, -3))
                for name in WORKLOADS:
                    requests = trace(name, costs, 2, settings, number)
                    outcomes = asyncio.run(replay.replay(llm.addresses.grpc, requests, vocab_size, number))
                    runs.setdefault((name, roles), []).append(figures := Figures.of(outcomes, slo))
                    print(f"  round {number + 1}, {row(f'{name}, {roles}', figures)}", file=sys.stderr, flush=True)
    return {name: {roles: medians(runs[name, roles]) for roles in ARRANGEMENTS} for name in WORKLOADS}


def predict(settings: DisaggregationSettings, costs: Costs, processes: int, slo: Slo) -> Results:
    """Simulates all workloads in all arrangements."""
    workers = WorkerOptions(16, NUM_BLOCKS * processes, MAX_MODEL_LEN)
    both = FleetOptions(
        prefill=0, decode=0, both=processes, max_queue=128 * processes, disaggregates=False, workers=workers
    )
    adaptive = replace(both, disaggregates=True, targets=Targets(slo.ttft_s, slo.tpot_s))
    prefills = sorted({max(1, processes * quarters // 4) for quarters in (1, 2, 3)} - {processes})
    splits = [replace(both, prefill=n, decode=processes - n, both=0, disaggregates=True) for n in prefills]
    results: Results = {}
    for name in WORKLOADS:
        requests = trace(name, costs, processes, settings, 0)

        def run(options: FleetOptions, requests: list[TraceRequest] = requests) -> Figures:
            return Figures.of(simulate(requests, costs, options), slo)

        divided = {f"split {o.prefill}p{o.decode}d": run(o) for o in splits}
        best = max(divided, key=lambda division: divided[division].good_per_s)
        results[name] = {best: divided[best], "both": run(both), "adaptive": run(adaptive)}
    return results


def regrets(found: dict[str, Figures]) -> dict[str, float]:
    """Returns the regret in goodput and in throughput against the better fixed arrangement; negative: adaptive has
    more.
    """
    adaptive, fixed = found["adaptive"], [figures for name, figures in found.items() if name != "adaptive"]
    return {
        name: 1.0 - getattr(adaptive, name) / max(getattr(figures, name) for figures in fixed)
        for name in ("good_per_s", "tokens_per_s")
    }


HEAD = "requests/s within limits | of all | tokens/s | TTFT p50 | p99 | ITL p50 | p99 | refused"


def row(name: str, f: Figures) -> str:
    times = " | ".join(f"{1e3 * value:.1f}" for value in (f.ttft_p50, f.ttft_p99, f.itl_p50, f.itl_p99))
    return f"{name} | {f.good_per_s:.2f} | {f.good_share:.0%} | {f.tokens_per_s:.1f} | {times} | {f.num_refused:g}"


def lines(title: str, results: Results) -> Iterator[str]:
    yield f"\n{title}; times in ms"
    yield f"| workload, arrangement | {HEAD} |"
    yield "|---" * (HEAD.count("|") + 2) + "|"
    for workload, found in results.items():
        for name, figures in found.items():
            yield f"| {row(f'{workload}, {name}', figures)} |"
        good, tokens = regrets(found).values()
        yield f"| {workload}, regret | {good:+.1%} | | {tokens:+.1%} | | | | | |"


def main(settings: DisaggregationSettings) -> None:
    slo = Slo(settings.slo_ttft, settings.slo_tpot)
    found: dict[str, Results] = {}
    if settings.rounds:
        config = ModelConfig.from_directory(resolve(settings.model, dummy=True).directory)
        before = fit(settings, config, -1)
        found["2 processes on this machine"] = measure(settings, before, config.vocab_size, slo)
        after = fit(settings, config, -2)
        print(f"a prefill step of 512 tokens: {before.prefill[-1][1]:.3f} s before, {after.prefill[-1][1]:.3f} s after")
        costs = replace(median([before, after]), origin=provenance())
        if settings.costs is not None:
            costs.save(settings.costs)
    elif settings.costs is None:
        raise StartupError("--rounds 0 needs --costs")
    else:
        costs = cost_files.load(settings.costs)
    for processes in settings.fleets:
        found[f"{processes} processes, simulated"] = predict(settings, costs, processes, slo)
    for title, results in found.items():
        print("\n".join(lines(title, results)))
    print(json.dumps({"benchmark": "disaggregation", "results": as_json(found), **provenance()}))


def as_json(found: dict[str, Results]) -> dict[str, Any]:
    return {
        title: {
            workload: {"regret": regrets(by_name), **{name: vars_of(figures) for name, figures in by_name.items()}}
            for workload, by_name in results.items()
        }
        for title, results in found.items()
    }


def vars_of(figures: Figures) -> dict[str, float]:
    return {field.name: getattr(figures, field.name) for field in fields(figures)}


if __name__ == "__main__":
    try:
        main(DisaggregationSettings.load(sys.argv[1:]))
    except StartupError as error:
        print(f"bench.served.disaggregation: {error}", file=sys.stderr)
        sys.exit(1)
