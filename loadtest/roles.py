"""Compares prefill and decode in two processes with both roles in one process (`--roles both`).

`python -m loadtest.roles` serves the benchmarks' model with 125M random parameters on this machine. Each round serves
the arrangements one after another. Each client sends its requests one at a time. Prints the results of each round and
their medians; the last line is JSON. The arrangements are measured some seconds apart, so a machine with other users
needs more rounds.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise

from pydantic import Field

from common.errors import StartupError
from common.settings import Settings, settings_config
from loadtest.batching import MODEL
from loadtest.latency import percentile_ms
from looseleaf import LLM, AsyncClient
from testing.system import prompts


class RolesSettings(Settings):
    """Flags of `python -m loadtest.roles`, which compares three arrangements of the roles: two processes; one process
    in which they take turns; and one process in which they run at the same time, each on half of the cores.
    """

    model_config = settings_config("LOOSELEAF_ROLES_", "loadtest.roles")

    model: str = Field(str(MODEL), description="model directory; its weights are random")
    seconds: float = Field(6.0, gt=0, description="seconds for each arrangement and kind of load")
    rounds: int = Field(3, ge=1, description="times that each arrangement is served")


@dataclass(frozen=True, slots=True)
class Arrangement:
    """An assignment of the two roles to processes and threads."""

    name: str
    roles: str
    threads: int
    steps: str = "auto"
    """The value of LOOSELEAF_WORKER_STEPS."""


@dataclass(frozen=True, slots=True)
class Load:
    """A load of `clients` that each send requests one after another."""

    name: str
    clients: int
    prompt_tokens: int
    output_tokens: int


LOADS = (Load("decode", 16, 32, 64), Load("prefill", 4, 512, 1), Load("mixed", 8, 256, 32))


def arrangements(num_cores: int) -> tuple[Arrangement, ...]:
    half = max(1, num_cores // 2)
    return (
        Arrangement("split", "split", half),
        Arrangement("both, turns", "both", num_cores, "turns"),
        Arrangement("both, free", "both", half, "free"),
    )


@dataclass(slots=True)
class Seen:
    """A record of the observations of all clients of one load."""

    num_tokens: int = 0
    num_prompt_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)

    def row(self, seconds: float) -> dict[str, float]:
        gaps = self.itl_s or [0.0]  # a single output token has no gap
        return {
            "prompt_tok_s": self.num_prompt_tokens / seconds,
            "output_tok_s": self.num_tokens / seconds,
            "ttft_p50_ms": percentile_ms(self.ttft_s, 0.5),
            "itl_p50_ms": percentile_ms(gaps, 0.5),
            "itl_p95_ms": percentile_ms(gaps, 0.95),
        }


async def send(client: AsyncClient, load: Load, seed: int, seen: Seen) -> None:
    """Sends one request, and adds its times and tokens to `seen`."""
    [prompt] = prompts(1, seed=seed, lengths=(load.prompt_tokens, load.prompt_tokens))
    times = [time.perf_counter()]
    stream = client.stream(prompt, max_tokens=load.output_tokens, temperature=0.0, ignore_eos=True, seed=0)
    async for piece in stream:
        if piece.token_ids:
            times.append(time.perf_counter())
            seen.num_tokens += len(piece.token_ids)
    seen.num_prompt_tokens += load.prompt_tokens
    seen.ttft_s.append(times[1] - times[0])
    seen.itl_s += [later - earlier for earlier, later in pairwise(times[1:])]


async def run_load(client: AsyncClient, load: Load, seconds: float, seed: int) -> dict[str, float]:
    """Runs all clients of `load` for `seconds`. Requests that are running at the end are finished and counted."""
    seen, started = Seen(), time.perf_counter()

    async def one(number: int) -> None:
        sent = 0
        while time.perf_counter() - started < seconds:
            await send(client, load, (seed * load.clients + number) * 1000 + sent, seen)
            sent += 1

    await asyncio.gather(*map(one, range(load.clients)))
    return seen.row(time.perf_counter() - started)


async def run_loads(address: str, seconds: float, seed: int) -> dict[str, dict[str, float]]:
    async with AsyncClient(address) as client:
        await run_load(client, LOADS[0], min(1.0, seconds), seed + 1000)  # warms up
        return {load.name: await run_load(client, load, seconds, seed) for load in LOADS}


def serve_and_measure(settings: RolesSettings, how: Arrangement, seed: int) -> dict[str, dict[str, float]]:
    os.environ.pop("LOOSELEAF_WORKER_STEPS", None)
    if how.roles == "both":
        os.environ["LOOSELEAF_WORKER_STEPS"] = how.steps
    served = {"load_format": "dummy", "max_model_len": 1024, "num_blocks": 4096}
    with LLM(settings.model, **served, roles=how.roles, threads=how.threads) as llm:
        return asyncio.run(run_loads(llm.addresses.grpc, settings.seconds, seed))


def show(load: str, name: str, row: dict[str, float]) -> None:
    print(f"{load:17} {name:12}", *(f"{title} {value:8.1f}" for title, value in row.items()), flush=True)


def main(settings: RolesSettings) -> None:
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    cases = arrangements(len(os.sched_getaffinity(0)))
    for number in range(settings.rounds):
        for how in cases:
            for load, row in serve_and_measure(settings, how, number).items():
                found.setdefault((load, how.name), []).append(row)
                show(f"round {number}: {load}", how.name, row)
    medians = {
        key: {name: round(statistics.median(row[name] for row in rows), 1) for name in rows[0]}
        for key, rows in found.items()
    }
    for load, name in sorted(medians):
        show(load, name, medians[load, name])
    result = {"benchmark": "roles", "machine": platform.processor() or platform.machine()}
    print(json.dumps(result | {f"{load}: {name}": row for (load, name), row in medians.items()}))


if __name__ == "__main__":
    try:
        main(RolesSettings.load(sys.argv[1:]))
    except StartupError as error:
        print(f"loadtest.roles: {error}", file=sys.stderr)
        sys.exit(1)
