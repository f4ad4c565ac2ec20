"""Compares the simulator with a real server on this machine (`python -m bench.served.simulated`).

Replays a trace several times, and measures the costs of the idle server before and after each time. Simulates the same
requests with the medians of these costs. Prints the figures of both, of the server the medians of the replays, and the
error of the simulation. The last line is JSON. `--costs` stores the measured costs.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

from pydantic import Field

from bench.rounds import medians
from bench.served.machine import provenance
from common.errors import StartupError
from common.settings import Settings, settings_config
from loadtest.workload import AZURE_TRACE
from looseleaf.serve.model_source import resolve
from looseleaf.serve.placement import is_small
from looseleaf.simulation import replay, trace
from looseleaf.simulation.costs import Costs, median
from looseleaf.simulation.fleet import FleetOptions, simulate
from looseleaf.simulation.report import Summary
from looseleaf.simulation.worker import WorkerOptions

MODEL = Path(__file__).resolve().parents[2] / "models" / "configs" / "llama-125m"
MAX_MODEL_LEN, NUM_BLOCKS, BLOCK_SIZE, LONGEST = 1280, 4096, 16, 1024
COMPARED = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "tokens_per_s")


class SimulatedSettings(Settings):
    """The settings of the comparison."""

    model_config = settings_config("LOOSELEAF_SIMULATED_", "bench.served.simulated")

    trace: Path = Field(AZURE_TRACE, description="trace to replay")
    model: str = Field(str(MODEL), description="model directory; its weights are random")
    requests: int = Field(120, ge=2, description="number of requests")
    rounds: int = Field(3, ge=1, description="number of replays at each rate")
    rates: list[float] = Field([1.0, 2.0], description="mean numbers of requests per second")
    divide: float = Field(8.0, ge=1, description="divide all lengths by this number")
    costs: Path | None = Field(None, description="where to write the measured costs")


def main(settings: SimulatedSettings) -> None:
    from engine.config import ModelConfig

    directory = resolve(settings.model, dummy=True).directory
    vocab_size, kv_bytes = ModelConfig.from_directory(directory).vocab_size, replay.kv_bytes_per_token(directory)
    rows: list[dict[str, object]] = []
    with replay.launch(settings.model, MAX_MODEL_LEN, NUM_BLOCKS, BLOCK_SIZE, dummy=True) as llm:
        address = llm.addresses.grpc

        def fit(seed: int) -> Costs:
            return asyncio.run(replay.fit(address, directory.name, kv_bytes, vocab_size, LONGEST, seed))

        traces = {
            rate: trace.read(settings.trace, count=settings.requests, divisor=settings.divide, rate=rate)
            for rate in settings.rates
        }
        fits, real = [fit(-1)], {rate: list[Summary]() for rate in traces}
        for number, (rate, requests) in enumerate(list(traces.items()) * settings.rounds):
            real[rate].append(Summary.of(asyncio.run(replay.replay(address, requests, vocab_size, number))))
            fits.append(fit(-2 - number))
    print("a prefill step of 512 tokens, in s:", ", ".join(f"{found.prefill[-1][1]:.3f}" for found in fits))
    costs = replace(median(fits), turns=is_small(), origin=provenance())
    if settings.costs is not None:
        costs.save(settings.costs)
    options = FleetOptions(turns=costs.turns, workers=WorkerOptions(BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN))
    if is_small():  # the server has both roles in one process
        options = replace(options, prefill=0, decode=0, both=1)
    for rate, summaries in real.items():
        rows.append(show(rate, medians(summaries), Summary.of(simulate(traces[rate], costs, options))))
    print(json.dumps({"benchmark": "simulated", "trace": settings.trace.name, "rows": rows, **provenance()}))


def show(rate: float, real: Summary, simulated: Summary) -> dict[str, object]:
    print(f"{rate:g} requests/s; refused: {real.num_refused} of the server, {simulated.num_refused} of the simulation")
    errors = {name: getattr(simulated, name) / getattr(real, name) - 1 for name in COMPARED}
    for name, error in errors.items():
        print(
            f"  {name:13} server {getattr(real, name):9.4f}  simulation {getattr(simulated, name):9.4f}  {error:+.1%}"
        )
    sys.stdout.flush()
    return {"rate": rate, "server": asdict(real), "simulation": asdict(simulated), "errors": errors}


if __name__ == "__main__":
    try:
        main(SimulatedSettings.load(sys.argv[1:]))
    except StartupError as error:
        print(f"bench.served.simulated: {error}", file=sys.stderr)
        sys.exit(1)
