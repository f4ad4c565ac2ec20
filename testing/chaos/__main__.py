"""Runs chaos scenarios and prints their tables (`python -m testing.chaos --scenario all`). The exit status is 1 if a
scenario fails.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from testing.chaos import (
    cancels,
    central,
    counted_pulls,
    disk,
    disk_restart,
    freezes,
    garbled,
    kills,
    outages,
    plain,
    poison,
    pressure,
    pulls,
    ranks,
    rolling,
    silence,
    size,
    staleness,
)
from testing.chaos.book import make_book, make_model
from testing.chaos.report import Report, Row
from testing.chaos.run import Run


@dataclass(frozen=True, slots=True)
class Scenario:
    """A scenario's function and its default number of trials."""

    run: Callable[[Run], Report]
    trials: int


SCENARIOS = {
    "none": Scenario(plain.none, 2000),
    "decode-kill": Scenario(kills.decode_kill, 100),
    "prefill-kill": Scenario(kills.prefill_kill, 100),
    "store-kill": Scenario(central.store_kill, 30),
    "gateway-kill": Scenario(central.gateway_kill, 30),
    "freeze": Scenario(freezes.freeze, 30),
    "redis-killed": Scenario(outages.killed, 20),
    "redis-flushed": Scenario(outages.flushed, 20),
    "redis-frozen": Scenario(outages.frozen, 20),
    "redis-slow": Scenario(outages.slow, 20),
    "redis-older": Scenario(outages.older, 20),
    "redis-garbled": Scenario(garbled.garbled, 10_000),
    "rolling": Scenario(rolling.rolling, 5),
    "poison": Scenario(poison.poison, 3),
    "pressure": Scenario(pressure.pressure, 1200),
    "staleness": Scenario(staleness.staleness, 1000),
    "cancels": Scenario(cancels.cancels, 2000),
    "disk-kill": Scenario(disk.disk_kill, 100),
    "disk-restart": Scenario(disk_restart.disk_restart, 20),
    "redis-silent": Scenario(silence.silent, 3),
    "redis-lost-large": Scenario(silence.lost, 3),
    "ledger-size": Scenario(size.ledger_size, 500_000),
    "ledger-loss": Scenario(size.ledger_loss, 100_000),
    **{f"rank-loss-{grid}": Scenario(partial(ranks.lost, grid=grid), 20) for grid in ranks.GRIDS},
    **{name: Scenario(run, 200) for name, run in counted_pulls.SCENARIOS.items()},
    **{name: Scenario(run, 50) for name, run in pulls.SCENARIOS.items()},
}


def main(argv: list[str]) -> int:
    """Runs the scenarios that the arguments name. Returns the exit status."""
    arguments = _parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends every `with` block, so that no process keeps running
    names = list(SCENARIOS) if "all" in arguments.scenario else arguments.scenario
    with tempfile.TemporaryDirectory(prefix="looseleaf-chaos-model-") as directory:
        began = time.monotonic()
        model = make_model(Path(directory))
        book = make_book(model, arguments.cases, seed=arguments.seed)
        print(f"{len(book)} cases answered by the oracle in {time.monotonic() - began:.0f} s", flush=True)
        reports = [
            _run(name, Run(model, book, arguments.trials or SCENARIOS[name].trials, arguments.seed)) for name in names
        ]
    bad = [report.scenario for report in reports if not report.good]
    print(f"bad: {', '.join(bad)}" if bad else f"all {len(reports)} scenarios good")
    return 1 if bad else 0


def _run(name: str, run: Run) -> Report:
    """Runs one scenario and prints its report. An exception counts as a failure of the scenario."""
    began = time.monotonic()
    try:
        report = SCENARIOS[name].run(run)
    except Exception as error:
        traceback.print_exc()
        report = run.report(name)
        report.rows.append(Row("carried through", (str(error) or repr(error)).splitlines()[0][:100], "yes", good=False))
    report.seconds = time.monotonic() - began
    print(report.text(), flush=True)
    return report


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m testing.chaos", description=__doc__)
    parser.add_argument("--scenario", nargs="+", default=["all"], choices=["all", *SCENARIOS], metavar="NAME")
    parser.add_argument("--trials", type=int, help="number of trials, instead of each scenario's default")
    parser.add_argument("--cases", type=int, default=400, help="number of distinct requests")
    parser.add_argument("--seed", type=int, default=1, help="seed of requests and schedules")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
