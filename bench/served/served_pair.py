"""Measures `looseleaf serve` of two checkouts in turn.

    python -m bench.served.served_pair --other ../before --starts 4 --rounds 3

Both servers run at the same time, each with the code of its checkout, and are measured in turn, so other load on the
machine affects both. Of two equal servers, the one that was started first may be 3% faster, so they are started
several times, in alternating order. For each workload, prints the medians of each, and the median of the rounds'
ratios: the mean time of a step for `decode N`, in which N requests run at once, and tokens per second and the 99th
percentile of the time to the first token for the workloads of `cpu_served`.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from pydantic import Field

from bench.checkout import Checkout
from bench.rounds import ratio, turned
from common.errors import StartupError
from common.settings import Settings, settings_config
from loadtest.batching import MODEL

DRIVER = """
import asyncio, statistics, sys
from bench.served.cpu_served import WORKLOADS, ServedSettings, row, run
from bench.served.startup import Served
from loadtest.workload import Lengths, Workload
model, load_format, roles = sys.argv[1:]
with Served(model, ["--roles", roles, "--load-format", load_format]) as server:
    print("ready", flush=True)
    for line in sys.stdin:
        kind, size, seed = line.split()
        size = int(size)
        shape, clients = WORKLOADS.get(kind), 16
        if shape is None:
            lengths = {"prompt": Lengths(128, 0.0, 128), "output": Lengths(256, 0.0, 256)}
            shape, clients = {**lengths, "shared_share": 0.0}, size
        settings = ServedSettings(requests=size, clients=clients)
        seen = asyncio.run(run(server.grpc, Workload(int(seed), 32_000, 2048, **shape), settings))
        rates = row(seen)
        most = 2 * statistics.median(seen.gap_s)  # a longer gap contains a prefill step
        step = statistics.mean(gap for gap in seen.gap_s if gap < most)
        print("found", step, rates["out_tok_s"], rates["ttft_p99_ms"], flush=True)
"""
"""A program that runs in each checkout. It reads (workload, number of requests, seed)."""


class PairSettings(Settings):
    """The settings of a comparison of the servers of two checkouts."""

    model_config = settings_config("LOOSELEAF_SERVED_PAIR_", "bench.served.served_pair")

    other: Path = Field(description="directory of the other checkout, with generated protos and built extensions")
    model: Path = Field(MODEL, description="Hugging Face model directory")
    load_format: Literal["auto", "dummy"] = "dummy"
    roles: Literal["both", "split"] = "both"
    streams: list[int] = Field([1, 8, 32], description="requests at once in the workloads of decode steps")
    requests: int = Field(64, ge=0, description="requests of a workload of `cpu_served`; 0: without these workloads")
    starts: int = Field(4, ge=2, multiple_of=2, description="starts of both servers; each goes first in half of them")
    rounds: int = Field(3, ge=1, description="measurements of each after a start")


Work = tuple[str, int]
"""(kind of workload, number of requests)."""
Found = tuple[float, float, float]
"""(seconds of a decode step, tokens per second, 99th percentile of the time to the first token in ms)."""


def ask(checkout: Checkout, kind: str, size: int, seed: int) -> Found:
    step, rate, first = map(float, checkout.ask(f"{kind} {size} {seed}"))
    return step, rate, first


def report(name: str, unit: str, pairs: list[tuple[float, float]]) -> None:
    """Prints one line about `pairs` (other, this)."""
    before, after = map(statistics.median, zip(*pairs, strict=True))
    print(f"{name}: other {before:.4g} {unit}, this {after:.4g}, {ratio(pairs)}")


def measure(settings: PairSettings, works: Sequence[Work], start: int) -> Iterator[tuple[Work, tuple[Found, Found]]]:
    """Starts both servers, and yields what is measured for each workload, of the other checkout and of this one."""
    options = [str(settings.model.resolve()), settings.load_format, settings.roles]
    paths = {"other": settings.other, "this": Path.cwd()}
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(Checkout(paths[name], DRIVER, options)) for name in turned(list(paths), start)
        }
        for number in range(settings.rounds):
            seed = start * settings.rounds + number
            for work in works:
                seen = {name: ask(servers[name], *work, seed) for name in turned(list(paths), number)}
                yield work, (seen["other"], seen["this"])


def main(settings: PairSettings) -> None:
    works: list[Work] = [("decode", size) for size in settings.streams]
    works += [(kind, settings.requests) for kind in ("served", "prefix") if settings.requests]
    found: dict[Work, list[tuple[Found, Found]]] = {work: [] for work in works}
    for start in range(settings.starts):
        for work, pair in measure(settings, works, start):
            found[work].append(pair)
    for (kind, size), rounds in found.items():
        if kind == "decode":
            report(f"decode {size}", "ms a step", [(a[0] * 1e3, b[0] * 1e3) for a, b in rounds])
        else:
            report(kind, "tok/s", [(a[1], b[1]) for a, b in rounds])
            report(f"{kind}, TTFT p99", "ms", [(a[2], b[2]) for a, b in rounds])


if __name__ == "__main__":
    try:
        main(PairSettings.load(sys.argv[1:]))
    except StartupError as error:
        print(f"bench.served.served_pair: {error}", file=sys.stderr)
        sys.exit(1)
