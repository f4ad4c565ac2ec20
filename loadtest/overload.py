"""Sends more requests than a service can handle: `python -m loadtest.overload`.

Serves the built-in model and sends requests for streamed completions over HTTP. First keeps enough requests in flight
to fill the service, which shows its capacity in requests per second. Then sends 0.8 times and, by default, 4 times this
rate, at times that do not depend on answers. At the end, during an overload, sends 1,000 requests (by default) at the
same instant to the gateway, and later to a server that only refuses. Prints goodput (answers finished per second),
times to first token of admitted requests, and times of refusals; the last line is JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pydantic import Field

from common.errors import StartupError
from common.settings import Settings, settings_config
from loadtest.latency import percentile_ms
from loadtest.plain_http import Connection, Pool, Reply
from looseleaf import LLM
from testing.system import prompts

PATH = "/v1/completions"
FILL_S = 16.0
"""The duration, in seconds, of the overload during which many requests arrive at the same instant."""


class OverloadSettings(Settings):
    """Flags of `python -m loadtest.overload`, which measures goodput, first tokens and refusals at several multiples of
    the service's capacity.
    """

    model_config = settings_config("LOOSELEAF_OVERLOAD_", "loadtest.overload")

    max_queue_wait: float = Field(1.0, ge=0, description="the gateway's --max-queue-wait, in seconds")
    output_tokens: int = Field(64, ge=1, description="tokens of each answer")
    at_once: int = Field(80, ge=1, description="requests in flight that fill the service")
    fill_s: float = Field(20.0, gt=0, description="seconds for which these requests are kept in flight")
    below_s: float = Field(30.0, gt=0, description="seconds for which 0.8 times the service's capacity is sent")
    over_s: float = Field(60.0, gt=0, description="seconds for which the overload is sent")
    over: float = Field(4.0, gt=1, description="the overload as a multiple of the service's capacity")
    burst: int = Field(1000, ge=0, description="requests in one instant")


@dataclass(slots=True)
class Seen:
    """The observations of one phase."""

    seconds: float
    replies: list[Reply] = field(default_factory=list)
    done_at: list[float] = field(default_factory=list)
    """The end of each answer, in seconds since the phase began."""
    failed: int = 0

    @property
    def first_s(self) -> list[float]:
        return [reply.first_s for reply in self.replies if reply.status == 200]

    @property
    def refused_s(self) -> list[float]:
        return [reply.whole_s for reply in self.replies if reply.status == 429]

    @property
    def goodput(self) -> float:
        """The number of answers per second that ended within the phase, excluding its first tenth. The value is 0 for
        an instantaneous phase.
        """
        began = self.seconds / 10
        if not began:
            return 0.0
        return sum(began < at <= self.seconds for at in self.done_at) / (self.seconds - began)

    def row(self) -> dict[str, object]:
        row: dict[str, object] = {
            "sent": len(self.replies) + self.failed,
            "answered": len(self.first_s),
            "refused": len(self.refused_s),
            "other": len(self.replies) - len(self.first_s) - len(self.refused_s) + self.failed,
            "without_retry_after": sum(r.status == 429 and not r.retry_after for r in self.replies),
            "goodput": round(self.goodput, 2),
        }
        for name, waits in (("ttft", self.first_s), ("refusal", self.refused_s)):
            for label, share in (("p50", 0.5), ("p99", 0.99)):
                row[f"{name}_{label}_ms"] = percentile_ms(waits, share) if waits else None
        return row


class Load:
    """A sender of requests of one shape to one service."""

    def __init__(self, address: str, settings: OverloadSettings) -> None:
        self._pool = Pool(address)
        self._settings = settings
        self._random = random.Random(1)
        kinds = prompts(500, seed=5, lengths=(16, 64))
        rest = {"max_tokens": settings.output_tokens, "ignore_eos": True, "stream": True}
        self._bodies = [json.dumps({"prompt": prompt, **rest}).encode() for prompt in kinds]

    def body(self) -> bytes:
        return self._random.choice(self._bodies)

    async def closed(self, at_once: int, seconds: float) -> Seen:
        """Keeps `at_once` requests in flight for `seconds`, and returns the observations."""
        seen, started = Seen(seconds), time.perf_counter()

        async def one_after_the_other() -> None:
            while time.perf_counter() - started < seconds:
                reply = await self._send(seen, started)
                if reply is None or reply.status != 200:
                    await asyncio.sleep(0.1)

        await asyncio.gather(*(one_after_the_other() for _ in range(at_once)))
        return seen

    async def open(self, rate: float, seconds: float) -> Seen:
        """Sends `rate` requests per second for `seconds`, at random times, and returns the observations."""
        seen, started, tasks = Seen(seconds), time.perf_counter(), set[asyncio.Task[Reply | None]]()
        at = 0.0
        while (at := at + self._random.expovariate(rate)) < seconds:
            await asyncio.sleep(max(0.0, started + at - time.perf_counter()))
            tasks.add(task := asyncio.create_task(self._send(seen, started)))
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)
        return seen

    async def _send(self, seen: Seen, started: float) -> Reply | None:
        try:
            reply = await self._pool.post(PATH, self.body())
        except (OSError, asyncio.IncompleteReadError):
            seen.failed += 1
            return None
        seen.replies.append(reply)
        if reply.status == 200:
            seen.done_at.append(time.perf_counter() - started)
        return reply

    def close(self) -> None:
        self._pool.close()


async def at_one_instant(address: str, num: int, body: bytes) -> Seen:
    """Sends `num` requests at the same time, on connections that are already open, and returns the observations."""
    connections = [await Connection.open(address) for _ in range(num)]
    seen = Seen(0.0)
    for reply in await asyncio.gather(*(c.post(PATH, body) for c in connections), return_exceptions=True):
        if isinstance(reply, Reply):
            seen.replies.append(reply)
        else:
            seen.failed += 1
    for connection in connections:
        connection.close()
    return seen


async def measure(address: str, settings: OverloadSettings) -> dict[str, Seen]:
    load = Load(address, settings)
    seen = {"filled": await load.closed(settings.at_once, settings.fill_s)}
    peak = seen["filled"].goodput
    seen["0.8 x"] = await load.open(0.8 * peak, settings.below_s)
    seen[f"{settings.over:g} x"] = await load.open(settings.over * peak, settings.over_s)
    if settings.burst:
        with refuser() as bare:  # both servers are measured under the same load of the machine
            fill = asyncio.create_task(load.open(settings.over * peak, FILL_S))
            await asyncio.sleep(FILL_S / 2)
            seen["burst"] = await at_one_instant(address, settings.burst, load.body())
            await asyncio.sleep(FILL_S / 4)
            seen["burst, bare"] = await at_one_instant(bare, settings.burst, load.body())
            await fill
    load.close()
    return seen


@contextmanager
def refuser() -> Iterator[str]:
    """A context manager that yields the HTTP address of a process that refuses every POST."""
    command = [sys.executable, "-m", "loadtest.refuser", "http"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def main(settings: OverloadSettings) -> None:
    with LLM(max_queue_wait=settings.max_queue_wait) as llm:
        seen = asyncio.run(measure(llm.addresses.http, settings))
    rows = {name: phase.row() for name, phase in seen.items()}
    columns = list(next(iter(rows.values())))
    print(f"{'':12} " + " ".join(f"{column:>{max(8, len(column))}}" for column in columns))
    for name, row in rows.items():
        print(f"{name:12} " + " ".join(f"{row[column]!s:>{max(8, len(column))}}" for column in columns))
    print(json.dumps({"benchmark": "overload", **settings.model_dump(mode="json"), "phases": rows}))


if __name__ == "__main__":
    try:
        main(OverloadSettings.load(sys.argv[1:]))
    except StartupError as error:
        print(f"loadtest.overload: {error}", file=sys.stderr)
        sys.exit(1)
