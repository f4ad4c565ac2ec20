"""Measures the cost of traces in CPU time per request (`python -m bench.served.traces`).

In each round, the same deployment serves requests whose traces are recorded and, separately, requests whose traces are
not. (Two deployments of one model would differ by more than the cost of traces.) The `traceparent` of a request
determines whether its trace is recorded. CPU time comes from the kernel (schedstat), so it does not include waiting.
The CPU time that the deployment uses without requests is subtracted. The price is the median, over the rounds, of the
relative increase of CPU time per request.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import grpc.aio
from pydantic import Field

from bench.served.frontend import Cpu, Helper
from common.settings import Settings, settings_config
from common.tracing import ENDPOINTS
from looseleaf import LLM
from protos.v1 import inference_pb2 as pb
from protos.v1 import inference_pb2_grpc, types_pb2

PROMPT = "Once upon a time, a fox lived near the old mill. Every morning the miller's daughter came with bread. "
IDLE_S = 5.0
SETTLE_S = 5.5
"""A time longer than the interval between exports of OpenTelemetry's SDK, so that a measurement includes the export of
its spans.
"""
FLAGS = ("00", "01")
"""The flags of a `traceparent` whose trace is not recorded, and of one whose trace is recorded."""


class TracesSettings(Settings):
    """The settings of the trace benchmark."""

    model_config = settings_config("LOOSELEAF_TRACES_", "bench.served.traces")

    model: str | None = Field(None, description="model directory; default: the built-in model")
    rounds: int = Field(6, ge=1, description="measurements of each arm")
    requests: int = Field(40, ge=1, description="requests of a measurement")
    width: int = Field(4, ge=1, description="requests at a time")
    max_tokens: int = Field(64, ge=1, description="output tokens of a request")


class Deployment:
    """A deployment that exports traces, and the CPU time of its services."""

    def __init__(self, llm: LLM, settings: TracesSettings) -> None:
        self._llm = llm
        self._settings = settings
        self._idle: dict[str, float] = {}

    def rest(self) -> None:
        """Measures the CPU time that the services use without requests."""
        before, began = self._cpu(), time.monotonic()
        time.sleep(IDLE_S)
        self._idle = {name: ns / (time.monotonic() - began) for name, ns in since(before, self._cpu()).items()}

    def run(self, flags: str, number: int) -> dict[str, float]:
        """Sends the requests of one measurement. Returns the CPU time of each service in microseconds per request."""
        before, began = self._cpu(), time.monotonic()
        asyncio.run(self._ask(flags, number))
        time.sleep(SETTLE_S)
        seconds, used = time.monotonic() - began, since(before, self._cpu())
        idle = self._idle or dict.fromkeys(used, 0.0)  # empty in the first runs, which warm up the deployment
        return {name: (ns - idle[name] * seconds) / 1e3 / self._settings.requests for name, ns in used.items()}

    async def _ask(self, flags: str, number: int) -> None:
        turns = asyncio.Semaphore(self._settings.width)
        async with grpc.aio.insecure_channel(self._llm.addresses.grpc) as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]

            async def one(index: int) -> None:
                stopping = types_pb2.StoppingParams(max_tokens=self._settings.max_tokens, ignore_eos=True)
                request = pb.GenerateRequest(text=f"{flags}, {number} and {index}. {PROMPT}", stopping=stopping)
                parent = f"00-{os.urandom(16).hex()}-{os.urandom(8).hex()}-{flags}"
                async with turns:
                    async for _ in stub.Generate(request, metadata=(("traceparent", parent),)):
                        pass

            await asyncio.gather(*(one(index) for index in range(self._settings.requests)))

    def _cpu(self) -> dict[str, int]:
        return {name: Cpu.of(pid).total_ns for name, pid in self._llm.pids.items()}


def since(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    return {name: after[name] - before[name] for name in before}


def report(rounds: Mapping[str, list[dict[str, float]]]) -> Iterator[str]:
    yield "| service | us/request, not recorded | recorded | more | price |"
    yield "|---|---|---|---|---|"
    for name in [*rounds["00"][0], "all"]:
        bare, traced = ([_of(name, used) for used in rounds[flags]] for flags in FLAGS)
        more = statistics.median(b - a for a, b in zip(bare, traced, strict=True))
        price = 100 * (statistics.median(b / a for a, b in zip(bare, traced, strict=True)) - 1)
        medians = " | ".join(f"{statistics.median(values):.0f}" for values in (bare, traced))
        yield f"| {name} | {medians} | {more:.0f} | {price:+.1f} % |"


def _of(name: str, used: Mapping[str, float]) -> float:
    return sum(used.values()) if name == "all" else used[name]


def main() -> None:
    settings = TracesSettings.load(sys.argv[1:])
    with Helper("trace_sink") as sink, ExitStack() as stack:
        os.environ[ENDPOINTS[1]] = sink.read().strip()
        deployment = Deployment(stack.enter_context(LLM(settings.model, roles="split")), settings)
        for flags in FLAGS:
            deployment.run(flags, 0)
        deployment.rest()
        num_before = sink.ask()["num_spans"]
        rounds: dict[str, list[dict[str, float]]] = {flags: [] for flags in FLAGS}
        for number in range(1, settings.rounds + 1):
            for flags in FLAGS if number % 2 else reversed(FLAGS):
                rounds[flags].append(deployment.run(flags, number))
        print(*report(rounds), sep="\n")
        num_spans = sink.ask()["num_spans"] - num_before
        print(f"{num_spans / settings.rounds / settings.requests:.1f} spans a recorded request reached the collector")


if __name__ == "__main__":
    main()
