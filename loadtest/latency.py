"""Measures how soon a busy system answers calls that need no model: `python -m loadtest.latency`.

By default, serves the benchmarks' model with 125M random parameters on this machine, and uses the numbers below.
Measures health checks of every service over gRPC while prompts of 4,000 tokens are prefilled. Measures refusals while
the gateway's queue is full, of requests that are sent one at a time and of 1,000 that are sent at the same instant. For
comparison, also sends 1,000 requests to a server that only refuses (`loadtest.refuser`). Prints percentiles; the last
line is JSON.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import Field

from common.errors import ResourceExhausted, StartupError
from common.settings import Settings, settings_config
from common.status import error_of
from loadtest.batching import MODEL
from looseleaf import LLM, AsyncClient
from protos.v1 import inference_pb2 as pb
from protos.v1 import inference_pb2_grpc
from testing.system import prompts


class LatencySettings(Settings):
    """Flags of `python -m loadtest.latency`, which times health checks during prefill, and refusals by a full queue."""

    model_config = settings_config("LOOSELEAF_LATENCY_", "loadtest.latency")

    model: str = Field(str(MODEL), description="model directory; its weights are random")
    prompt_tokens: int = Field(4000, ge=1, description="length of the prompts that are prefilled meanwhile")
    num_prompts: int = Field(8, ge=1, description="number of prompts that are prefilled meanwhile")
    refusals: int = Field(200, ge=1, description="requests beyond the limit, one after the other")
    burst: int = Field(1000, ge=1, description="requests beyond the limit in one instant")
    interval_s: float = Field(0.02, gt=0, description="time between probes")


async def probe_health(address: str, interval_s: float, busy: asyncio.Event) -> list[float]:
    """Repeats health checks of one service until `busy` is set. Returns the duration of each in seconds."""
    waits: list[float] = []
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while not busy.is_set():
            started = time.perf_counter()
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=30)
            waits.append(time.perf_counter() - started)
            await asyncio.sleep(interval_s)
    return waits


async def health_under_prefill(llm: LLM, settings: LatencySettings) -> dict[str, list[float]]:
    """Repeats health checks of every service while long prompts are prefilled. Returns the duration of each in seconds,
    by service.
    """
    done = asyncio.Event()
    services = llm.addresses.services
    probes = [asyncio.create_task(probe_health(address, settings.interval_s, done)) for address in services.values()]
    lengths = (settings.prompt_tokens, settings.prompt_tokens)
    async with AsyncClient(llm.addresses.grpc) as client:
        long = prompts(settings.num_prompts, seed=1, lengths=lengths)
        await asyncio.gather(*(client.generate(p, max_tokens=2, ignore_eos=True) for p in long))
    done.set()
    return dict(zip(services, await asyncio.gather(*probes), strict=True))


async def refusals_when_full(llm: LLM, settings: LatencySettings, limit: int) -> dict[str, list[float]]:
    """Returns the seconds until requests beyond the limit are refused: by the gateway, sent one after another
    ("refusal") and all at the same instant ("burst"), and by the server that only refuses ("burst, bare").
    """
    waits: list[float] = []
    async with AsyncClient(llm.addresses.grpc) as client:
        wave = [
            asyncio.create_task(client.generate(p, max_tokens=512, ignore_eos=True))
            for p in prompts(limit, seed=2, lengths=(32, 32))
        ]
        await asyncio.sleep(2.0)
        for prompt in prompts(settings.refusals, seed=3, lengths=(32, 32)):
            started = time.perf_counter()
            try:
                await client.generate(prompt, max_tokens=1)
            except ResourceExhausted as refusal:
                assert refusal.retry_after_s, "a refusal must say when to retry"
                waits.append(time.perf_counter() - started)
            await asyncio.sleep(settings.interval_s)
        burst = await refusals_at_once(llm.addresses.grpc, settings.burst)
        for task in wave:
            task.cancel()
        await asyncio.gather(*wave, return_exceptions=True)
    with refuser() as address:
        return {"refusal": waits, "burst": burst, "burst, bare": await refusals_at_once(address, settings.burst)}


async def refusals_at_once(address: str, num: int) -> list[float]:
    """Returns the seconds until each of `num` calls, all sent at the same instant, is refused."""
    request = pb.GenerateRequest(text="Once upon a time there was a fox and a crow.")

    async def refused(stub: inference_pb2_grpc.InferenceServiceStub) -> float:
        started = time.perf_counter()
        try:
            async for _ in stub.Generate(request, timeout=30):
                pass
        except grpc.aio.AioRpcError as error:
            assert isinstance(refusal := error_of(error), ResourceExhausted) and refusal.retry_after_s, refusal
            return time.perf_counter() - started
        raise AssertionError("a request beyond the limit was admitted")

    async with grpc.aio.insecure_channel(address) as channel:
        await channel.channel_ready()
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        return await asyncio.gather(*(refused(stub) for _ in range(num)))


@contextmanager
def refuser() -> Iterator[str]:
    """A context manager that yields the address of a process that refuses every Generate call."""
    with subprocess.Popen([sys.executable, "-m", "loadtest.refuser"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def percentile_ms(waits: Sequence[float], share: float) -> float:
    """Returns the value at the position `share` (0 to 1) of the sorted `waits` (seconds), in milliseconds."""
    return round(1e3 * sorted(waits)[min(len(waits) - 1, int(len(waits) * share))], 2)


def main(settings: LatencySettings) -> None:
    limit = 256
    result: dict[str, object] = {"benchmark": "latency"}
    with LLM(settings.model, load_format="dummy", max_model_len=4096, max_queue=limit) as llm:
        waits = asyncio.run(health_under_prefill(llm, settings))
        waits |= asyncio.run(refusals_when_full(llm, settings, limit))
    print(f"{'ms':16} {'probes':>7} {'p50':>8} {'p99':>8} {'max':>8}")
    for name, values in waits.items():
        numbers = [percentile_ms(values, share) for share in (0.5, 0.99, 1.0)]
        print(f"{name:16} {len(values):7} " + " ".join(f"{number:8.2f}" for number in numbers))
        result[name] = dict(zip(("p50_ms", "p99_ms", "max_ms"), numbers, strict=True))
    print(json.dumps(result))


if __name__ == "__main__":
    try:
        main(LatencySettings.load(sys.argv[1:]))
    except StartupError as error:
        print(f"loadtest.latency: {error}", file=sys.stderr)
        sys.exit(1)
