"""Measures the load of many hosts on a gateway and Redis (`python -m bench.fleet`).

One real Redis server has the registry and the ledgers of many arenas. Each host has an arena, two prefill workers and
two decode workers. The workers exist only as records, which the gateway's code reads. Prints a table with these
columns, among others:

* poll: time to read the list of workers and stores, which the gateway does four times a second
* Redis: share of one core that Redis needs for these polls, and to renew each worker's record and lease once a second
* lookup: time to find the cached prefix of a prompt in every arena, once per request
* arenas that answered: number of arenas whose cached prefix the lookup returned
* Redis, lookup: CPU time of Redis for one lookup
* routes: time to choose the prefill worker and the decode worker, once per request
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import redis

from bench.ledger import LAYOUT, Bench
from block_store.arena.arena import Arena
from block_store.ledger.prefix_hash import hash_blocks, prompt_chain
from block_store.ledger.rebuild import open_ledger
from block_store.redis import redis_server
from block_store.redis.registry import StoreRecord, WorkerRegistry
from common.types import Role, SamplingParams, StoppingParams, WorkerLoad, WorkerRecord
from gateway.fleet.discovery import Discovery
from gateway.fleet.routing import Asked, Route, Router
from gateway.intake.resolved_request import ResolvedRequest
from testing.gateway.parts import BLOCK_SIZE, make_record
from testing.ledger.store import Caller, TestStore

ROLES: tuple[Role, ...] = ("prefill", "prefill", "decode", "decode")
POLLS_PER_S = 4
DOMAIN = "ab" * 32
ROUNDS = 50
TABLE_LEN = 64


class Hosts:
    """The simulated hosts: arenas, their ledgers and the records of their workers, in one Redis server."""

    def __init__(self, client: redis.Redis, directory: Path, count: int, prompt: list[int]) -> None:
        self._registry = WorkerRegistry(client)
        self._stores: list[tuple[TestStore, Caller]] = []
        self.records: list[WorkerRecord] = []
        start, _ = prompt_chain(bytes.fromhex(DOMAIN), b"", prompt, 0, BLOCK_SIZE)
        hashes = hash_blocks(start, prompt, BLOCK_SIZE)
        rng = random.Random(1)
        for number in range(count):
            store = TestStore(client, directory / str(number), num_blocks=2 * len(hashes))
            caller = store.caller()
            store.fill(caller, hashes[: rng.randrange(len(hashes))])
            self._stores.append((store, caller))
            load = WorkerLoad(prompt_tokens_per_s=4_000.0, free_blocks=1_000, total_blocks=2_000)
            self.records += [
                replace(
                    make_record(role, f"{number}-{place}-{role}", arena_id=store.arena.arena_id, hash_domain=DOMAIN),
                    load=load, max_group_blocks=1_000,
                )
                for place, role in enumerate(ROLES)
            ]  # fmt: skip

    def publish(self) -> None:
        """Publishes all records and renews all leases, as the workers and stores do once a second."""
        for record in self.records:
            self._registry.publish(record)
        for store, caller in self._stores:
            arena, ledger = store.arena, store.ledger
            self._registry.publish_store(
                StoreRecord(arena.arena_id, "host:1", ledger.dataset, "", "", arena.num_blocks, BLOCK_SIZE, pulls=True)
            )
            for _ in ROLES:
                ledger.beat(caller.epoch)


def redis_cpu_s(client: redis.Redis) -> float:
    info = client.info("cpu")
    return float(info["used_cpu_sys"]) + float(info["used_cpu_user"])


async def timed_ms(work: Callable[[], Awaitable[object]], rounds: int) -> float:
    """Returns the median time of `rounds` calls in milliseconds."""
    times: list[float] = []
    for _ in range(rounds):
        began = time.perf_counter()
        await work()
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times)


async def measure(handle: redis_server.RedisHandle, directory: Path, count: int, prompt: list[int]) -> list[str]:
    """Returns the cells of the row for `count` hosts."""
    hosts = Hosts(handle.client, directory, count, prompt)
    hosts.publish()
    router, polled = Router(), asyncio.Event()

    def on_records(records: list[WorkerRecord]) -> None:
        router.update(records, time.monotonic())

    def on_stores(stores: object) -> None:
        router.stores = {record.arena_id: True for record in hosts.records}
        polled.set()

    discovery = Discovery(handle.url, 0.01, on_records, on_stores=on_stores)
    polling = asyncio.create_task(discovery.run())
    await polled.wait()

    async def poll() -> None:
        polled.clear()
        await polled.wait()

    began_s = redis_cpu_s(handle.client)
    poll_ms = await timed_ms(poll, ROUNDS)
    poll_cpu_s = (redis_cpu_s(handle.client) - began_s) / ROUNDS
    polling.cancel()
    began_s = redis_cpu_s(handle.client)
    hosts.publish()
    publish_cpu_s = redis_cpu_s(handle.client) - began_s

    request = ResolvedRequest("r", prompt, SamplingParams(), StoppingParams(), 1.0)
    found: dict[str, int] = {}

    async def look() -> None:
        found.update(await discovery.cached_tokens(hosts.records, request))

    began_s = redis_cpu_s(handle.client)
    lookup_ms = await timed_ms(look, ROUNDS)
    lookup_cpu_ms = 1e3 * (redis_cpu_s(handle.client) - began_s) / ROUNDS
    asked = Asked(len(prompt), found)

    async def choose() -> None:
        now = time.monotonic()
        prefill = router.pick_prefill(asked, now, lambda record: True)
        assert prefill is not None
        prefill.worker.dispatched_tokens += len(prompt)
        decode = router.pick_decode(Route(prefill.record, asked), now, lambda record: True)
        assert decode is not None
        decode.worker.dispatched_sequences += 1

    routes_ms = await timed_ms(choose, ROUNDS)
    discovery.close()
    share = poll_cpu_s * POLLS_PER_S + publish_cpu_s
    answered = f"{len(found)} of {count}"
    return [str(count), str(4 * count), f"{poll_ms - 10:.1f}", f"{share:.1%}", f"{lookup_ms:.1f}", answered,
            f"{lookup_cpu_ms:.2f}", f"{routes_ms:.2f}"]  # fmt: skip


def request_cpu_ms() -> float:
    """Returns the CPU time in milliseconds that Redis needs for the ledger calls of one request."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="looseleaf-bench-") as directory:
        handle = redis_server.connect(None, directory)
        arena = Arena.create(Path(directory), LAYOUT, 4 * TABLE_LEN)
        calls = Bench(arena, open_ledger(handle.client, arena), TABLE_LEN)
        began_s = redis_cpu_s(handle.client)
        for number in range(ROUNDS):
            calls.round(number)
        cpu_s = redis_cpu_s(handle.client) - began_s
        handle.close()
        return 1e3 * cpu_s / ROUNDS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=(1, 4, 25, 100))
    parser.add_argument("--prompt", type=int, default=2_048, help="tokens")
    asked = parser.parse_args()
    prompt = [number % 1_000 for number in range(asked.prompt)]
    print(f"ledger calls of a request of {TABLE_LEN} blocks: {request_cpu_ms():.2f} ms of CPU time in Redis\n")
    print("| hosts | workers | poll, ms | Redis | lookup, ms | arenas that answered | Redis, lookup, ms | routes, ms |")
    print("|---|---|---|---|---|---|---|---|")
    for count in asked.hosts:
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="looseleaf-bench-") as directory:
            handle = redis_server.connect(None, directory)
            print(f"| {' | '.join(asyncio.run(measure(handle, Path(directory), count, prompt)))} |", flush=True)
            handle.close()


if __name__ == "__main__":
    main()
