"""Measures the requests per second that the front serves, and the CPU time of each process per request, from which the
cores for 1,000 requests a second follow.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from bench.paper.parts import Claim, Options, Section, table
from bench.served.frontend import START_S, Cpu, FrontendSettings, Helper, Stack
from common.errors import StartupError
from loadtest.svg import axis_of, bars
from looseleaf.llm import LLM

LIMIT_S = 90
GOAL = 1000.0
CLIENTS, OUTPUT_LEN = 32, 8
SECONDS, QUICK_SECONDS = 8.0, 1.0
KINDS = ("http", "grpc")


def closed_loop(kind: str, address: str, num_tokens: int, pids: Mapping[str, int], seconds: float) -> dict[str, Any]:
    """Lets CLIENTS clients send one request after another. Returns the requests per second, and the CPU time of each
    process in us per request. Raises StartupError if the first answers take too long, or if a request is refused.
    """
    with Helper("frontend_requests", kind, address, str(CLIENTS), str(num_tokens)) as clients:
        deadline = time.monotonic() + START_S
        while clients.ask()["answers"] < 4 * CLIENTS:
            if time.monotonic() > deadline:
                raise StartupError(f"the {kind} clients have no answers after {START_S:.0f} s")
            time.sleep(0.1)
        pids = {**pids, "clients": clients.pid}
        before, began, first = _cpu(pids), time.monotonic(), clients.ask()
        time.sleep(seconds)
        after, passed_s, last = _cpu(pids), time.monotonic() - began, clients.ask()
    if last["refused"]:
        raise StartupError(f"{last['refused']} of the {kind} requests were refused")
    num = last["answers"] - first["answers"]
    return {
        "kind": kind, "tokens": num_tokens, "requests_per_s": round(num / passed_s, 1),
        "us": {name: round((after[name].total_ns - before[name].total_ns) / 1e3 / num, 1) for name in pids},
    }  # fmt: skip


def _cpu(pids: Mapping[str, int]) -> dict[str, Cpu]:
    return {name: Cpu.of(pid) for name, pid in pids.items()}


def measure(options: Options) -> dict[str, Any]:
    seconds = QUICK_SECONDS if options.quick else SECONDS
    with LLM(None) as llm:
        addresses = {"http": llm.addresses.http, "grpc": llm.addresses.grpc}
        real = [closed_loop(kind, addresses[kind], OUTPUT_LEN, llm.pids, seconds) for kind in KINDS]
    with Stack(FrontendSettings.load([])) as stack:
        pids = {"gateway": stack.gateway.pid, "workers": stack.worker.pid}
        front = [closed_loop(kind, stack.addresses[kind], 1, pids, seconds) for kind in KINDS]
    return {"seconds": seconds, "clients": CLIENTS, "model": real, "no_model": front}


def section(result: Mapping[str, Any]) -> Section:
    arms = {"built-in model": result["model"], "no model": result["no_model"]}
    rows, bars_of, names = [], {}, []
    for arm, found in arms.items():
        for row in found:
            gateway = row["us"]["gateway"]
            others = sum(us for name, us in row["us"].items() if name not in ("gateway", "clients"))
            rows.append([
                arm, row["kind"], row["tokens"], row["requests_per_s"], gateway, round(others, 1), row["us"]["clients"],
                f"{gateway * GOAL / 1e6:.1f}", f"{(gateway + others) * GOAL / 1e6:.1f}",
            ])  # fmt: skip
            names.append(f"{arm}, {row['kind']}")
            bars_of[names[-1]] = (gateway, others, row["us"]["clients"])
    most = max(row["requests_per_s"] for row in result["model"])
    front = max(row["requests_per_s"] for row in result["no_model"])
    cores = {row["kind"]: row["us"]["gateway"] * GOAL / 1e6 for row in result["model"]}
    needed = {kind: max(1, math.ceil(value / 0.8)) for kind, value in cores.items()}
    claims = [
        Claim(
            f"{GOAL:,.0f} requests a second, built-in model", "issue 23", f"{GOAL:,.0f} requests/s",
            f"{most:.0f} requests/s of {OUTPUT_LEN} tokens on two cores, with the clients", most >= GOAL,
            "" if most >= GOAL else "two cores are busy. By the CPU time per request, the gateways need "
            + " or ".join(f"{value:.1f} cores ({kind})" for kind, value in cores.items())
            + ", and a gateway process uses one core",
        ),
        Claim(
            f"{GOAL:,.0f} requests a second at the front, workers that compute nothing", "issue 23",
            f"{GOAL:,.0f} requests/s", f"{front:.0f} requests/s of 1 token", front >= GOAL,
            "" if front >= GOAL else "one gateway process uses one core; several gateways share the workers",
        ),
    ]  # fmt: skip
    described = (
        f"{result['clients']} clients in one process send one request after another for {result['seconds']:g} s, each "
        "with a different prompt of 16 token ids and without streaming (HTTP) or streamed (gRPC). With the built-in "
        f"model, a request has {OUTPUT_LEN} output tokens, and all services run as `looseleaf serve` starts them. With "
        "*no model*, workers answer at once with one token, so the gateway and the clients have the two cores. CPU "
        "times come from the kernel. The last columns are the cores that "
        f"{GOAL:,.0f} requests a second need by these times: a gateway is a process with one event loop, so at least "
        + " or ".join(f"{count} gateways ({kind})" for kind, count in needed.items())
        + " at 80 % of a core each.\n\n"
        + table(
            ["services", "protocol", "tokens", "requests/s", "gateway (us)", "workers and store (us)", "clients (us)",
             f"gateway cores for {GOAL:,.0f}/s", "all services"],
            rows,
        )
    )  # fmt: skip
    parts = ("gateway", "workers and store", "clients")
    plot = bars(
        "CPU time per request", axis_of("us", [sum(values) for values in bars_of.values()], zero=True), names,
        {part: [bars_of[name][index] for name in names] for index, part in enumerate(parts)},
    )  # fmt: skip
    return Section("Requests per second at the front", described, claims, {"front.svg": plot})
