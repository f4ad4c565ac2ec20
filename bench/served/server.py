"""Starts a complete deployment for benchmarks, whose decode worker records its blocks after every step, and sends
requests to it.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.served.steps import VARIABLE, StepRecord, read
from looseleaf import metrics_page
from looseleaf.client import AsyncClient
from looseleaf.llm import serve_settings
from looseleaf.options import GenerateOptions
from looseleaf.results import Completion
from looseleaf.serve.children import Child
from looseleaf.serve.launcher import Addresses, Launcher

STORY_LEN = 448
"""The maximum length of a prompt of `stories`, in tokens."""


class WatchedServer(Launcher):
    """A launcher whose decode worker is watched. Workers that end are not restarted, because nothing calls `check`."""

    def __init__(self, model: str | None, settings: Mapping[str, Any], decode: Mapping[str, str] | None = None) -> None:
        """Prepares the deployment, which `with` starts. `settings` are the settings of `LLM`; `decode` are environment
        variables of the decode worker, without their prefix.
        """
        self._scratch = tempfile.TemporaryDirectory(prefix="looseleaf-bench-")
        self._file = Path(self._scratch.name) / "steps.jsonl"
        self._variables = {f"LOOSELEAF_DECODE_{name}": value for name, value in (decode or {}).items()}
        self.log: deque[str] = deque(maxlen=20_000)
        super().__init__(serve_settings(model, {"roles": "split", **settings}), self.log.append)
        self.addresses: Addresses

    def _spawn(self, name: str, package: str, flags: Sequence[str], extra: Mapping[str, str] | None = None) -> Child:
        if package != "decode_svc":
            return super()._spawn(name, package, flags, extra)
        variables = {VARIABLE: str(self._file), **self._variables, **(extra or {})}
        return super()._spawn(name, "bench.served.watched_decode", flags, variables)

    def steps(self, since_ns: int = 0, until_ns: int = 1 << 62) -> list[StepRecord]:
        """Returns the records of the decode worker's steps in this interval (monotonic clock)."""
        return [step for step in read(self._file) if since_ns <= step.at_ns < until_ns]

    def dispatched(self, worker: str) -> int:
        """Returns the number of requests that the gateway has sent to a worker."""
        return int(self.metric("looseleaf_worker_requests_total", worker=worker))

    def metric(self, name: str, **labels: str) -> float:
        """Returns the sum of the samples of a gateway metric with these labels."""
        return metrics_page.total(metrics_page.read(self.addresses.http), name, **labels)

    def __enter__(self) -> Self:
        self.addresses = self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._scratch.cleanup()


@dataclass(frozen=True, slots=True)
class Request:
    """A request of a benchmark."""

    prompt_ids: Sequence[int]
    options: GenerateOptions = field(default_factory=GenerateOptions)


async def send_all(address: str, requests: Sequence[Request], at_once: int) -> list[Completion]:
    """Sends the requests, up to `at_once` at a time. Returns the answers in the order of the requests."""
    places = asyncio.Semaphore(at_once)
    async with AsyncClient(address) as client:

        async def send(request: Request) -> Completion:
            async with places:
                return await client.generate(request.prompt_ids, **request.options)

        return await asyncio.gather(*map(send, requests))


async def stories(address: str, lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Returns prompts of these lengths, which should be at most STORY_LEN. The prompts are beginnings of stories that
    the served model generates with different seeds.
    """
    async with AsyncClient(address) as client:
        beginning = list(await client.tokenize("Once upon a time"))
    longest = max(2, max(lengths) - len(beginning))
    options = GenerateOptions(max_tokens=longest, temperature=1.0, ignore_eos=True, cache_salt="stories")
    requests = [Request(beginning, {**options, "seed": seed + number}) for number in range(len(lengths))]
    told = await send_all(address, requests, 32)
    return [[*beginning, *done.token_ids][:length] for done, length in zip(told, lengths, strict=True)]
