"""Measures goodput by DistServe's definition: the rate at which 90 % of the requests meet limits on the time to first
token and on the mean time per later token.

Four arrangements of two processes with one thread each serve the same requests in turn, at one rate after another. The
real schedulers then serve longer traces of the same kind on the simulator's clock, with step times measured in the same
run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

from bench.paper.arrivals import poisson
from bench.paper.parts import Claim, Options, Section, table
from bench.rounds import turned
from bench.served.simulated import LONGEST, MAX_MODEL_LEN, MODEL, NUM_BLOCKS
from engine.config import ModelConfig
from gateway.fleet.sharing import Targets
from loadtest.svg import Axis, axis_of, lines
from looseleaf.llm import LLM
from looseleaf.simulation import replay
from looseleaf.simulation.costs import Costs
from looseleaf.simulation.fleet import FleetOptions, simulate
from looseleaf.simulation.outcome import Outcome
from looseleaf.simulation.report import Slo, quantile
from looseleaf.simulation.trace import TraceRequest
from looseleaf.simulation.worker import WorkerOptions

LIMIT_S = 540
SHARE = 0.9
PREFILLS, STEPS = 5.0, 2.5
"""The limits, as multiples of the time to prefill a mean prompt alone, and of a decode step of four sequences."""
LOADS, SECONDS = (0.15, 0.3, 0.45, 0.6, 0.8), 20.0
QUICK_LOADS, QUICK_SECONDS = (0.3,), 2.0
"""The rates, as shares of what two processes could serve if they did nothing else, and the time at each in seconds."""
MOST_FAILED = 2
"""An arrangement serves no higher rate after this many rates at which it misses the SLO."""
PROMPT, OUTPUT = (32, 160), (8, 32)
"""The smallest and the largest length of a prompt and of an output in tokens, drawn uniformly."""
FLEET, SIMULATED_S, HALVINGS = 4, 15.0, 5
"""Number of processes of the larger simulated fleet, the time in which simulated requests arrive, and the number of
rates that a bisection tries.
"""
Point = dict[str, float]
"""A rate, the share of requests that met the SLO (attained), and 90th percentiles in seconds."""


def trace(rate: float, seconds: float, seed: int) -> list[TraceRequest]:
    """Returns requests with Poisson arrivals. Every prompt is different."""
    return poisson(f"goodput/{rate}/{seed}", rate, seconds, PROMPT, OUTPUT)


def arms(slo: Slo) -> dict[str, dict[str, Any]]:
    """Returns the services' settings. In `both` and `adaptive`, a prompt is one step; in `chunked`, steps are as short
    as the limit on TPOT requires.
    """
    whole = {"max_itl": 0.0, "max_num_batched_tokens": 512}
    return {
        "split": {"roles": "split"},
        "both": {"roles": "both", **whole},
        "chunked": {"roles": "both", "max_itl": 1e3 * slo.tpot_s},
        "adaptive": {"roles": "adaptive", **whole, "slo_ttft": slo.ttft_s, "slo_itl": slo.tpot_s},
    }


def work_s(costs: Costs) -> float:
    """Returns the time for which a mean request occupies a process whose batch has eight sequences."""
    length, output = sum(PROMPT) // 2, sum(OUTPUT) / 2
    return costs.prefill_s([(0, length)]) + output * costs.decode_s(8, 8 * length) / 8


def slo_of(costs: Costs) -> Slo:
    length = sum(PROMPT) // 2
    ttft_s, tpot_s = PREFILLS * costs.prefill_s([(0, length)]), STEPS * costs.decode_s(4, 4 * length)
    return Slo(round(ttft_s, 2), round(tpot_s, 3), SHARE)


def point_of(rate: float, outcomes: Sequence[Outcome], slo: Slo) -> Point:
    served = [outcome for outcome in outcomes if not outcome.refusal]
    return {
        "rate": rate, "requests": len(outcomes), "attained": round(slo.attained(outcomes), 3),
        "ttft_p90": round(quantile([outcome.ttft_s for outcome in served], 0.9), 3),
        "tpot_p90": round(quantile([outcome.tpot_s for outcome in served], 0.9), 4),
    }  # fmt: skip


def falling(points: Sequence[Mapping[str, float]]) -> list[float]:
    """Returns the shares of requests within the SLO that are closest to the measured ones and do not grow with the rate
    (isotonic regression by pooling adjacent violators, weighted by the numbers of requests). A single miss at a low
    rate, between rates without one, would otherwise decide the goodput.
    """
    pools: list[tuple[float, float, int]] = []
    """Requests within the SLO, requests, and points of each pool, whose share is that of all its points."""
    for point in points:
        pools.append((point["attained"] * point["requests"], point["requests"], 1))
        while len(pools) > 1 and pools[-1][0] * pools[-2][1] > pools[-2][0] * pools[-1][1]:
            pools[-2:] = [tuple(map(sum, zip(*pools[-2:], strict=True)))]  # type: ignore[list-item]
    return [within / total for within, total, count in pools for _ in range(count)]


def goodput(points: Sequence[Mapping[str, float]]) -> float:
    """Returns the rate at which the share of requests within the SLO (`falling`) falls below SHARE, by linear
    interpolation between the points; the share at rate 0 counts as 1. Returns the last rate if the share does not fall
    below it.
    """
    rate, attained = 0.0, 1.0
    for point, share in zip(points, falling(points), strict=True):
        if share < SHARE:
            return rate + (attained - SHARE) / (attained - share) * (point["rate"] - rate)
        rate, attained = point["rate"], share
    return rate


def served(roles: str, **settings: Any) -> LLM:
    num = 1 if roles == "split" else 2
    return LLM(
        str(MODEL), max_model_len=MAX_MODEL_LEN, num_blocks=NUM_BLOCKS, load_format="dummy", threads=1, roles=roles,
        prefill=num, decode=num, **settings,
    )  # fmt: skip


def fit() -> Costs:
    """Returns the step times of a process with one thread, measured on an idle server."""
    kv_bytes, vocab_size = replay.kv_bytes_per_token(MODEL), ModelConfig.from_directory(MODEL).vocab_size
    with LLM(
        str(MODEL), max_model_len=MAX_MODEL_LEN, num_blocks=NUM_BLOCKS, load_format="dummy", threads=1, roles="both"
    ) as llm:
        return asyncio.run(replay.fit(llm.addresses.grpc, MODEL.name, kv_bytes, vocab_size, LONGEST))


def serve(rates: Sequence[float], seconds: float, slo: Slo) -> dict[str, list[Point]]:
    """Starts the real services of all arrangements, and serves one rate after another with each in turn. Returns the
    points of each arrangement up to its second miss of the SLO.
    """
    vocab_size = ModelConfig.from_directory(MODEL).vocab_size
    points: dict[str, list[Point]] = {}
    with ExitStack() as stack:
        addresses = {}
        for name, arm in arms(slo).items():
            addresses[name] = stack.enter_context(served(**arm)).addresses.grpc
            warm_up = [TraceRequest(0.0, ((-100 - n, PROMPT[1]),), 16) for n in range(6)]
            asyncio.run(replay.replay(addresses[name], warm_up, vocab_size, -3))
            points[name] = []
        for seed, rate in enumerate(rates):
            for name in turned(list(points), seed):
                if sum(point["attained"] < SHARE for point in points[name]) < MOST_FAILED:
                    outcomes = asyncio.run(replay.replay(addresses[name], trace(rate, seconds, 0), vocab_size, seed))
                    points[name].append(point_of(rate, outcomes, slo))
    return points


def fleets(costs: Costs, processes: int, slo: Slo) -> dict[str, FleetOptions]:
    """Returns the simulated arrangements of `processes` processes, with every division of `split`."""
    workers = WorkerOptions(16, NUM_BLOCKS * processes, MAX_MODEL_LEN, max_num_batched_tokens=512, max_itl_s=0.0)
    both = FleetOptions(
        prefill=0, decode=0, both=processes, disaggregates=False, workers=workers, max_queue=128 * processes
    )
    chunked = replace(both, workers=replace(workers, max_itl_s=slo.tpot_s))
    targets = Targets(slo.ttft_s, slo.tpot_s)
    splits = {
        f"split {n}p{processes - n}d": replace(both, prefill=n, decode=processes - n, both=0, disaggregates=True)
        for n in range(1, processes)
    }
    adaptive = replace(both, disaggregates=True, targets=targets)
    return {**splits, "both": both, "chunked": chunked, "adaptive": adaptive}


def predict(costs: Costs, processes: int, seconds: float) -> dict[str, list[Point]]:
    """Simulates all arrangements, each at rates that bisect towards its goodput. Returns the points of each by
    ascending rate, and of `split` only the best division.
    """
    slo = slo_of(costs)
    found: dict[str, list[Point]] = {}
    for name, options in fleets(costs, processes, slo).items():
        low, high, points = 0.0, 1.5 * processes / work_s(costs), list[Point]()
        for _ in range(HALVINGS):
            rate = round((low + high) / 2, 2)
            points.append(point_of(rate, simulate(trace(rate, seconds, 1), costs, options), slo))
            low, high = (rate, high) if points[-1]["attained"] >= SHARE else (low, rate)
        found[name] = sorted(points, key=lambda point: point["rate"])
    best = max((name for name in found if name.startswith("split")), key=lambda name: goodput(found[name]))
    return {best: found[best], **{name: points for name, points in found.items() if not name.startswith("split")}}


def measure(options: Options) -> dict[str, Any]:
    loads, seconds = (QUICK_LOADS, QUICK_SECONDS) if options.quick else (LOADS, SECONDS)
    costs = fit()
    slo, rates = slo_of(costs), [round(2 * load / work_s(costs), 1) for load in loads]
    real = serve(rates, seconds, slo)
    simulated_s = QUICK_SECONDS if options.quick else SIMULATED_S
    simulated = {str(processes): predict(costs, processes, simulated_s) for processes in (2, FLEET)}
    return {"seconds": seconds, "slo": asdict(slo), "costs": asdict(costs), "real": real, "simulated": simulated}


def section(result: Mapping[str, Any]) -> Section:
    real, simulated, slo = result["real"], result["simulated"], Slo(**result["slo"])
    found = {name: goodput(points) for name, points in real.items()}
    predicted = {
        num: {name.split()[0]: goodput(points) for name, points in arms.items()} for num, arms in simulated.items()
    }
    fleet = max(simulated, key=int)
    divisions = {num: next(iter(arms)).removeprefix("split ") for num, arms in simulated.items()}
    rows = [
        [name, f"{found[name]:.1f}", f"{predicted['2'][name]:.1f}", f"{predicted[fleet][name]:.1f}",
         *_misses(real[name])]
        for name in real
    ]  # fmt: skip
    header = [
        "arrangement", "goodput, real", "2 processes, simulated", f"{fleet} processes, simulated",
        "first missed rate", "share within limits", "TTFT p90 (s)", "TPOT p90 (ms)",
    ]  # fmt: skip
    described = (
        f"Goodput is the rate at which {SHARE:.0%} of the requests meet both limits: {slo.ttft_s:g} s to the first "
        f"token (TTFT), and a mean of {1e3 * slo.tpot_s:g} ms per later token (TPOT). These are {PREFILLS:g} times the "
        f"time to prefill a mean prompt alone, and {STEPS:g} times a decode step of four sequences, as measured at the "
        "start of the run with one thread. Requests arrive at random "
        f"(Poisson), with prompts of {PROMPT[0]} to {PROMPT[1]} tokens and outputs of {OUTPUT[0]} to {OUTPUT[1]}. Each "
        f"rate is served for {result['seconds']:g} s by real services with llama-125m (random weights): two processes "
        "with one thread each, which share the two cores with the gateway, Redis and the client. *split*: one process "
        "prefills, one decodes. *both*: each serves whole requests, and a prompt is one step. *chunked*: the "
        "same, with prompts in chunks so small that a decode step follows within the TPOT limit. *adaptive*: as "
        "*both*, and the gateway decides for each request whether one process or two work on it. At each rate, the "
        "arrangements serve the same requests in turn. The goodput is interpolated between the rates, after the "
        "shares have been made to fall with the rate (isotonic regression). With the numbers of requests here, a "
        "share is uncertain by about 4 points.\n\n"
        "The simulator runs the real schedulers and router with the step times that the same run measured first; every "
        f"process has a core of its own there. Its *split* is the best division: {divisions['2']} of 2 and "
        f"{divisions[fleet]} of {fleet} processes.\n\n" + table(header, rows)
    )
    plot = lines(
        f"Requests within {slo.ttft_s:g} s and {1e3 * slo.tpot_s:g} ms per token, by rate",
        axis_of("requests/s", [0.0, *(point["rate"] for points in real.values() for point in points)], zero=True),
        Axis("% of requests", 0, 100),
        {name: [(point["rate"], 100 * point["attained"]) for point in points] for name, points in real.items()},
    )
    return Section("Goodput under an SLO", described, _claims(found, predicted[fleet], fleet), {"goodput.svg": plot})


def _misses(points: Sequence[Mapping[str, float]]) -> list[str]:
    missed = next((point for point in points if point["attained"] < SHARE), None)
    if missed is None:
        return [f"none up to {points[-1]['rate']:g}", "", "", ""]
    ttft_s, tpot_ms = missed["ttft_p90"], 1e3 * missed["tpot_p90"]
    return [f"{missed['rate']:g}", f"{missed['attained']:.0%}", f"{ttft_s:.2f}", f"{tpot_ms:.1f}"]


def _claims(found: Mapping[str, float], fleet: Mapping[str, float], num: str) -> list[Claim]:
    small = (
        "with two cores, a division has one core for each role, and one of them is idle unless prompts and outputs "
        "cost the same; the paper places many GPUs. Here, both roles also share cores with the gateway and the client"
    )

    def claim(text: str, source: str, theirs: str, pair: tuple[float, float], more: float, why: str) -> Claim:
        ratio = pair[0] / pair[1] if pair[1] else float("inf")
        holds = ratio >= more
        return Claim(
            text, source, theirs, f"{ratio:.2f} times ({pair[0]:.1f} and {pair[1]:.1f} requests/s)", holds,
            "" if holds else why,
        )  # fmt: skip

    return [
        claim("split has more goodput than both roles in one process, prompts whole", "DistServe, abstract",
              "up to 7.4 times", (found["split"], found["both"]), 1.0, small),
        claim(f"the same, {num} simulated processes, best division", "DistServe, abstract", "up to 7.4 times",
              (fleet["split"], fleet["both"]), 1.0, "a decode step is cheap beside a prompt on this CPU, so a stall "
              "by a whole prompt rarely breaks the limit on the mean time per token"),
        claim("chunked prefills have more goodput than whole ones", "Sarathi-Serve, abstract", "2.6 to 5.6 times",
              (found["chunked"], found["both"]), 1.0, "the limit is on the mean time per token, which chunks do not "
              "shorten; the paper limits the 99th percentile of the gaps"),
        claim("adaptive has at least 0.95 of the best of the others", "issue 23, item 7", ">= 0.95",
              (found["adaptive"], max(value for name, value in found.items() if name != "adaptive")), 0.95,
              "see the shares in the table: a few requests decide a rate"),
    ]  # fmt: skip
