"""Scenarios with a ledger as large as that of a GPU's arena, without a model. They measure the CPU time that the
ledger's scripts take in Redis, and the time from the end of Redis until the ledger is complete again. `trials` is the
number of blocks. In `ledger_size`, up to 64 workers hold them, one of which holds a fifth. In `ledger_loss`, a single
worker holds all blocks.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from block_store.arena.arena import Arena
from block_store.errors import BlockStoreError
from block_store.ledger.codec import SealItem
from block_store.ledger.inspection import inspect
from block_store.ledger.prefix_lengths import MOST_ARENAS, PrefixLengths
from block_store.ledger.reaper import Reaper
from block_store.ledger.rebuild import open_ledger
from block_store.ledger.scripts import CHUNK, RELEASE_CHUNK, CallId, LedgerScripts, chunks
from block_store.redis import redis_server
from block_store.redis.registry import StoreRecord
from block_store.server.fsck import fsck
from common.types import BlockRef, CacheQuota, Epoch
from testing.chaos.report import Report
from testing.chaos.run import Run
from testing.ledger.store import LAYOUT

LIMIT_MS = 5.0
"""The limit of Redis' CPU time per script call."""
WHOLE_S = 5.0
"""The limit in seconds for the time from the end of Redis until the ledger is complete again, with up to 100,000
references. With more references, the limit is higher in proportion.
"""
REFERENCES = 100_000
STEP_S = 0.5
BLOCKS_A_HOLDER = 6000
PROCESSES = 4
SPARE_BLOCKS = 8192
REPEATS = 20


@dataclass(frozen=True, slots=True)
class Size:
    """The number of blocks of each holder. One holder has `big` blocks, and `num_others` holders have `each` blocks."""

    big: int
    num_others: int
    each: int

    @classmethod
    def of(cls, num_blocks: int) -> Size:
        num_others = PROCESSES * max(1, min(16, num_blocks // BLOCKS_A_HOLDER // PROCESSES)) - 1
        big = num_blocks // 5
        return cls(big, num_others, (num_blocks - big) // num_others)

    @property
    def num_references(self) -> int:
        """The number of references, excluding the reserves, which change."""
        return self.big + self.num_others * self.each


def ledger_size(run: Run) -> Report:
    """Runs the scenario with `trials` blocks and many workers."""
    return within(run.report("ledger-size"), Size.of(run.trials), 1.0)


def ledger_loss(run: Run) -> Report:
    """Runs the scenario with `trials` blocks and one worker."""
    return within(run.report("ledger-loss"), Size(run.trials, 0, 0), 1.0)


def within(report: Report, size: Size, slack: float) -> Report:
    """Measures the scripts and an outage with a ledger of this size. `slack` is a factor for the time limits, which
    allows for a slow machine.
    """
    with _store(size.num_references + SPARE_BLOCKS) as store, _workers(store, size) as workers:
        report.told("holders, references", f"{size.num_others + 1}, {size.num_references:,}")
        used: int = store.redis.client.info("memory")["used_memory"]
        report.told("Redis' memory", f"{used / size.num_references:.0f} bytes a reference")
        _scripts(report, store, slack)
        _outage(report, store, size, slack)
        for worker in workers:
            assert worker.stdin is not None and worker.stdout is not None
            print("stop", file=worker.stdin, flush=True)
        told = [json.loads(worker.stdout.readline()) for worker in workers if worker.stdout is not None]
        longest_s = max(t["longest_step_s"] for t in told)
        if size.num_others:  # many holders share an interpreter
            report.told("longest step while Redis was gone", f"{longest_s:.2f} s")
        else:
            report.at_most("longest step while Redis was gone", longest_s, slack * STEP_S, "s")
        report.none("references that one side lacks", sum(t["different"] for t in told), size.num_references, "blocks")
    return report


@dataclass(slots=True)
class Store:
    """An arena with a ledger in a private Redis, and a reaper."""

    arena: Arena
    redis: redis_server.RedisHandle
    reaper: Reaper

    @property
    def ledger(self) -> LedgerScripts:
        return LedgerScripts.attach(self.redis.client, self.arena)


@contextmanager
def _store(num_blocks: int) -> Iterator[Store]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="ll-size-") as directory:
        handle = redis_server.connect(None, directory, confined=False)
        handle.client.config_set("slowlog-log-slower-than", round(1000 * LIMIT_MS))
        arena = Arena.create(Path(directory) / "arena", LAYOUT, num_blocks)
        ledger = open_ledger(handle.client, arena)
        record = StoreRecord(
            arena.arena_id, "", ledger.dataset, handle.run_id, str(arena.directory), num_blocks, LAYOUT.block_size
        )
        reaper = Reaper(ledger, arena, handle, record)
        reaper.start()
        try:
            yield Store(arena, handle, reaper)
        finally:
            reaper.stop()
            handle.close()


@contextmanager
def _workers(store: Store, size: Size) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts one process for the largest holder, and up to PROCESSES processes for the others. Yields the processes
    when all holders have their blocks.
    """
    shares = [size.num_others // PROCESSES + (i < size.num_others % PROCESSES) for i in range(PROCESSES)]
    started = [_worker(store, 1, size.big), *(_worker(store, share, size.each) for share in shares if share)]
    try:
        for worker in started:
            assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
        yield started
    finally:
        for worker in started:
            worker.kill()
            worker.communicate()


def _worker(store: Store, num_holders: int, num_blocks: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "testing.chaos.holding", str(store.arena.directory), store.redis.url]
    return subprocess.Popen(
        [*command, str(num_holders), str(num_blocks)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


# --- cost of scripts


def _scripts(report: Report, store: Store, slack: float) -> None:
    """Runs the ledger's operations repeatedly, and reports for each the maximum CPU time of a call in Redis."""
    costs: dict[str, float] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        answer, spent_ms = _cpu_ms(store.redis.client, call)
        costs[name] = max(costs.get(name, 0.0), spent_ms)
        return answer

    for _ in range(REPEATS):
        _life_of_a_table(store.ledger, timed)
    worst = max(costs, key=lambda name: costs[name])
    report.told("scripts, most Redis CPU", ", ".join(f"{name} {ms:.1f}" for name, ms in sorted(costs.items())))
    report.at_most(f"the longest of them ({worst})", costs[worst], slack * LIMIT_MS, "ms of Redis CPU")


def _life_of_a_table(ledger: LedgerScripts, timed: Callable[[str, Callable[[], Any]], Any]) -> None:
    one, two = (ledger.register(name, writer_slot=0, lease_s=60) for name in ("one", "two"))
    numbers: dict[Epoch, int] = {one: 0, two: 0}

    def lane(epoch: Epoch) -> CallId:
        numbers[epoch] += 1
        return CallId(epoch, numbers[epoch])

    hashes, quota = [secrets.token_bytes(32) for _ in range(CHUNK)], CacheQuota(secrets.token_bytes(32), 0)
    timed("beat", lambda: ledger.beat(one, 60))
    refs: list[BlockRef] = timed("alloc", lambda: ledger.alloc(lane(one), CHUNK))
    timed("seal", lambda: ledger.seal(lane(one), [SealItem(*pair, quota) for pair in zip(refs, hashes, strict=True)]))
    ticket = timed("hand_over", lambda: ledger.hand_over(lane(one), refs))
    timed("release", lambda: ledger.release(lane(one), refs[:RELEASE_CHUNK]))
    timed("claim", lambda: ledger.claim(lane(two), ticket))
    lengths = PrefixLengths(ledger.client)
    timed("prefix_lengths", lambda: lengths.find([ledger] * MOST_ARENAS, hashes))
    timed("acquire", lambda: ledger.acquire(lane(one), [hashes]))
    timed("holdings", lambda: ledger.holdings_after(one, 0))
    timed("holds", lambda: ledger.holds(one, refs))
    timed("assert_held", lambda: ledger.assert_held(lane(one), refs))
    timed("inspect", lambda: inspect(ledger))
    for part in chunks(refs, RELEASE_CHUNK):
        timed("release", lambda part=part: ledger.release(lane(one), part))  # type: ignore[misc]
    delivered = [SealItem(ref, secrets.token_bytes(32), quota) for ref in ledger.alloc(lane(one), CHUNK)]
    ticket, refs = timed("deliver", lambda: ledger.deliver(lane(one), delivered))
    timed("keep", lambda: ledger.keep(ticket, refs))
    timed("give_up", lambda: ledger.give_up(ticket))
    fresh = [SealItem(ref, secrets.token_bytes(32), quota) for ref in ledger.alloc(lane(one), RELEASE_CHUNK)]
    ledger.seal(lane(one), fresh)
    timed("release", lambda: ledger.release(lane(one), [item.ref for item in fresh]))
    timed("unregister", lambda: ledger.unregister(two))
    ledger.unregister(one)
    timed("reap", ledger.reap)


def _cpu_ms(client: Any, call: Callable[[], Any]) -> tuple[Any, float]:
    """Makes a call. Returns its answer, and the CPU time in ms that Redis used during the call."""
    before = _cpu(client)
    answer = call()
    return answer, 1000 * (_cpu(client) - before)


def _cpu(client: Any) -> float:
    info: dict[str, Any] = client.info("cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


# --- loss of Redis


def _outage(report: Report, store: Store, size: Size, slack: float) -> None:
    """Kills Redis while workers are running. Waits until the ledger has every reference again, for at most 120 s, and
    then runs fsck.
    """
    slow = store.redis.client.slowlog_len()
    report.told("scripts that took over 5 ms of time, while filling", str(slow))
    assert store.redis.process is not None
    began = time.monotonic()
    store.redis.process.kill()
    while (held := _references(store)) < size.num_references:
        if time.monotonic() > began + 120:
            break
        time.sleep(0.02)
    whole_s = time.monotonic() - began
    report.at_most("from Redis' end to a ledger that has all references", whole_s, _whole_s(size) * slack, "s")
    report.at_least("references in the new ledger", held, size.num_references)
    findings = fsck(store.arena, store.ledger, wait_s=30)
    report.none("differences that fsck finds", len(findings.differences), store.arena.num_blocks, "blocks")
    report.none("workers that did not report to it", len(findings.silent), size.num_others + 1, "workers")
    for difference in findings.differences[:3]:
        report.told("  of these", difference[:100])


def _whole_s(size: Size) -> float:
    return WHOLE_S * max(1.0, size.num_references / REFERENCES)


def _references(store: Store) -> int:
    try:
        return sum(holder.num_references for holder in inspect(store.ledger).holders)
    except BlockStoreError:
        return 0
