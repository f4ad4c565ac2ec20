"""Measures `looseleaf serve` on this machine (`python -m bench.served.cpu_served`).

Serves a model with Llama's architecture and random weights, once with both roles in one process and once with split
roles. For each server, measures the time from start to the first token, two workloads over gRPC (lengths as in chats; a
common prefix of 512 tokens), and memory. The two servers are measured in turn. The last line is JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pydantic import Field

from bench.served.startup import Served, memory
from common.errors import StartupError
from common.settings import Settings, settings_config
from loadtest.batching import MODEL
from loadtest.latency import percentile_ms
from loadtest.throughput import Seen
from loadtest.workload import Lengths, Request, Workload
from looseleaf.client import AsyncClient

WORKLOADS = {
    "served": {
        "prompt": Lengths.of_mean(220, 1.0, 1500), "output": Lengths.of_mean(120, 0.7, 512), "shared_share": 0.0,
    },
    "prefix": {
        "prompt": Lengths(median=576, sigma=0.05, most=800), "output": Lengths.of_mean(64, 0.6, 256),
        "shared_share": 1.0, "num_prefixes": 1, "prefix_len": 512,
    },
}  # fmt: skip


class ServedSettings(Settings):
    """The settings of the benchmark of `looseleaf serve`."""

    model_config = settings_config("LOOSELEAF_SERVED_", "bench.served.cpu_served")

    model: str = Field(str(MODEL), description="directory with a Llama config.json; the weights are random")
    requests: int = Field(64, ge=1, description="requests of a workload")
    clients: int = Field(16, ge=1, description="requests in flight")
    rounds: int = Field(3, ge=1, description="repetitions; medians are printed")


def llama_bytes(config: Mapping[str, int]) -> int:
    """Returns the size in bytes of a Llama model with bf16 parameters, from its config.json."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    attention = 2 * hidden * width * (heads + config["num_key_value_heads"])
    layer = attention + 3 * hidden * config["intermediate_size"] + 2 * hidden
    embeddings = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return 2 * (embeddings + config["num_hidden_layers"] * layer + hidden)


async def client_loop(client: AsyncClient, work: Iterator[Request], seen: Seen) -> None:
    """Sends requests one after another until `work` has no more requests, and adds the times to `seen`."""
    for request in work:
        at = started = time.perf_counter()
        stream = client.stream(request.prompt_ids, max_tokens=request.max_tokens, temperature=0.0, ignore_eos=True)
        async for delta in stream:
            if delta.token_ids:
                now = time.perf_counter()
                waits = seen.gap_s if at > started else seen.first_s
                waits.append(now - at)
                seen.num_tokens += len(delta.token_ids)
                at = now


async def run(address: str, workload: Workload, settings: ServedSettings) -> Seen:
    """Sends one request that warms up the server, then all requests of a workload. Returns the observations."""
    work, seen = iter([workload.request(number) for number in range(settings.requests)]), Seen()
    async with AsyncClient(address) as client:
        await client.generate([random.Random(workload.seed).randrange(16, 999) for _ in range(32)], max_tokens=8)
        started = time.perf_counter()
        await asyncio.gather(*(client_loop(client, work, seen) for _ in range(settings.clients)))
        seen.seconds = time.perf_counter() - started
    return seen


def row(seen: Seen) -> dict[str, float]:
    gaps = seen.gap_s or [0.0]
    return {
        "out_tok_s": seen.num_tokens / seen.seconds,
        "ttft_p50_ms": percentile_ms(seen.first_s, 0.5),
        "ttft_p99_ms": percentile_ms(seen.first_s, 0.99),
        "itl_p50_ms": percentile_ms(gaps, 0.5),
        "itl_p99_ms": percentile_ms(gaps, 0.99),
    }


def used(server: Served, model: Path) -> dict[str, float]:
    """Returns the memory of all processes of the server in MiB. "beyond" excludes KV and one copy of the weights."""
    return memory(server.pid, llama_bytes(json.loads((model / "config.json").read_text()))).row()


def measure(settings: ServedSettings) -> dict[str, Any]:
    """Returns, by roles, the start-up time, the memory, and the medians of every workload."""
    rows: dict[tuple[str, str], list[dict[str, float]]] = {}
    with ExitStack() as stack:
        servers = {}
        for roles in ("both", "split"):
            flags = ["--roles", roles, "--load-format", "dummy"]
            servers[roles] = stack.enter_context(Served(settings.model, flags))
        for number in range(settings.rounds):
            for kind, shape in WORKLOADS.items():
                for roles, server in servers.items():
                    workload = Workload(number, 32_000, 2048, **shape)  # type: ignore[arg-type]
                    seen = asyncio.run(run(server.grpc, workload, settings))
                    rows.setdefault((roles, kind), []).append(row(seen))
                    print(f"round {number} {kind:8} {roles:6} {rows[roles, kind][-1]}", flush=True)
        found = {
            roles: {
                "first_token_s": round(server.first_token_s, 2),
                "first_token_cpu_s": round(server.first_token_cpu_s, 2),
                "memory_mib": used(server, Path(settings.model)),
            }
            for roles, server in servers.items()
        }
    for (roles, kind), measured in rows.items():
        found[roles][kind] = {name: round(statistics.median(one[name] for one in measured), 2) for name in measured[0]}
    return found


def main(settings: ServedSettings) -> None:
    found = measure(settings)
    for roles, values in found.items():
        print(f"{roles:6} first token after {values['first_token_s']} s; MiB {values['memory_mib']}")
        for kind in WORKLOADS:
            print(f"{roles:6} {kind:8} {values[kind]}")
    print(json.dumps({"benchmark": "served", "model": settings.model, "requests": settings.requests, **found}))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are stopped too
    try:
        main(ServedSettings.load(sys.argv[1:]))
    except StartupError as error:
        print(f"bench.served.cpu_served: {error}", file=sys.stderr)
        sys.exit(1)
