"""A scenario that changes keys and values in Redis at random under load, in the ledger and in the registry. No token
may be wrong, and no process may end. The changes may cause cache misses, repeated prefills and rebuilds, and may make a
few requests fail. At the end, `fsck` repairs the damage that the services have not noticed, and the ledger must then be
consistent.
"""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from typing import Any

from block_store.ledger.invariants import check_running
from block_store.server.fsck import repair
from testing.chaos.report import Report
from testing.chaos.run import Run, judge
from testing.chaos.stack import Stack
from testing.system import wait_for

BURST = 25
"""The largest number of values changed in one burst. Traffic continues between bursts."""
HUGE = 1 << 16
MOST_FAILED = 0.1
"""The largest share of requests that may fail. A request may fail if it loses its blocks in several rebuilds."""
WHOLE_S = 30.0
ANSWERS_S = 120.0


def garbled(run: Run) -> Report:
    """Changes `trials` values in Redis at random while requests run."""
    with run.stack() as stack:
        return garble_on(run, stack)


def garble_on(run: Run, stack: Stack) -> Report:
    """Runs `garbled` on an existing stack."""
    report, pids = run.report("redis-garbled"), stack.pids
    garbler = Garbler(stack.redis.client, run.rng)
    rebuilds = stack.arena.rebuild_count
    with run.traffic(stack) as traffic:
        traffic.wait_for(run.concurrency, timeout_s=120)
        for first in range(0, run.trials, BURST):
            garbler.burst(min(BURST, run.trials - first))
            traffic.wait_for(len(traffic.answers) + run.concurrency // 2, ANSWERS_S)
        answers = traffic.stop()
    judge(report, stack, answers, most_failed=MOST_FAILED)
    report.told("values changed", ", ".join(f"{n:,} {kind}" for kind, n in sorted(garbler.changed.items())))
    report.told("ledger rebuilds", str(stack.arena.rebuild_count - rebuilds))
    ended = sum(stack.pids[service] != pid for service, pid in pids.items())
    report.none("processes that ended", ended, run.trials, "changes")
    report.at_most("whole after fsck's repair", _repaired(stack), WHOLE_S, "s")
    held = sum(len(holder.own) for holder in stack.inspect().holders if holder.kind == "ticket")
    report.none("blocks in tickets at the end", held, 1, "looks")
    return report


def _repaired(stack: Stack) -> float:
    began = time.monotonic()
    repair(stack.arena, stack.ledger())

    def findings() -> list[str]:
        try:
            return check_running(stack.ledger())
        except Exception as error:  # the ledger is not ready yet; the error may be of any kind
            return [str(error)]

    wait_for(findings, lambda found: not found, WHOLE_S, "the ledger is not whole after a repair")
    return time.monotonic() - began


class Garbler:
    """A source of random changes to the keys of a Redis server. The changes depend on the type of a key's value."""

    def __init__(self, client: Any, rng: random.Random) -> None:
        self._client = client
        self._rng = rng
        self.changed: Counter[str] = Counter()
        """The number of changed values, by the type of the key."""

    def burst(self, num_values: int) -> None:
        """Makes the given number of changes to random existing keys. Lists the keys at the beginning, and again when a
        chosen key no longer exists.
        """
        wanted, families = self.changed.total() + num_values, self._families()
        while self.changed.total() < wanted:
            key = self._rng.choice(families[self._rng.choice(sorted(families))])
            try:
                if not self._change(key):
                    families = self._families()
            except Exception as error:  # this package may not import redis' error classes
                # Services also change the key, so it may have a different type by now, or be shorter.
                if not any(word in str(error) for word in ("WRONGTYPE", "no such key", "index out of range")):
                    raise

    def _change(self, key: bytes) -> bool:
        """Changes the value of a key. Returns False if the key no longer exists."""
        kind = self._client.type(key).decode()
        if kind == "none":
            return False
        if self._rng.random() < 0.02:
            self._replace(key)
        else:
            getattr(self, f"_{kind}")(key)
        self.changed[kind] += 1
        return True

    def _families(self) -> dict[bytes, list[bytes]]:
        """Returns the existing keys, grouped by their names without trailing digits, so that a group of one key can be
        chosen as often as a group of a hundred.
        """
        families: dict[bytes, list[bytes]] = {}
        for key in sorted(self._client.scan_iter(count=1000)):
            families.setdefault(re.sub(rb"\d+$", b"", key), []).append(key)
        return families

    def _replace(self, key: bytes) -> None:
        """Deletes the key. In three of four cases, creates it again as a string, a list or a sorted set."""
        self._client.delete(key)
        match self._rng.randrange(4):
            case 0:
                self._client.set(key, self._value(b""))
            case 1:
                self._client.rpush(key, self._value(b""))
            case 2:
                self._client.zadd(key, {self._value(b""): self._score(0.0)})

    def _string(self, key: bytes) -> None:
        size = self._client.strlen(key)
        at = self._rng.randrange(max(1, size))
        match self._rng.randrange(4):
            case 0:
                new = self._rng.randbytes(1)
            case 1:
                new = self._rng.randbytes(64)
            case 2:  # a piece from a different position
                other = self._rng.randrange(max(1, size))
                new = self._client.getrange(key, other, other + 55)
            case _:
                old = self._client.getrange(key, at, at) or b"\0"
                new = bytes([(old[0] + self._rng.choice((-1, 1))) % 256])
        self._client.setrange(key, at, new)

    def _hash(self, key: bytes) -> None:
        field, *_ = self._client.hrandfield(key, 1) or [b"field"]
        match self._rng.randrange(8):
            case 0:
                self._client.hdel(key, field)
            case 1:
                self._client.hset(key, self._value(field), self._value(b""))
            case 2:  # the value of a different field
                other, *_ = self._client.hrandfield(key, 1) or [b"field"]
                self._client.hset(key, field, self._client.hget(key, other) or b"")
            case _:
                self._client.hset(key, field, self._value(self._client.hget(key, field) or b""))

    def _zset(self, key: bytes) -> None:
        member, score, *_ = self._client.zrandmember(key, 1, withscores=True) or [b"0", b"0"]
        match self._rng.randrange(4):
            case 0:
                self._client.zrem(key, member)
            case 1:
                self._client.zadd(key, {self._value(member): self._score(float(score))})
            case _:
                self._client.zadd(key, {member: self._score(float(score))})

    def _list(self, key: bytes) -> None:
        at = self._rng.randrange(max(1, self._client.llen(key)))
        match self._rng.randrange(4):
            case 0:
                self._client.lpop(key)
            case 1:  # a duplicate
                self._client.lpush(key, self._client.lindex(key, at) or b"0")
            case _:
                self._client.lset(key, at, self._value(self._client.lindex(key, at) or b""))

    def _set(self, key: bytes) -> None:
        if self._rng.randrange(2):
            self._client.spop(key)
        else:
            self._client.sadd(key, self._value(b"1"))

    def _value(self, old: bytes) -> bytes:
        """Returns random bytes, no bytes, many bytes, a number, or the old value with a random byte at one position."""
        rng = self._rng
        number = int(old) if old.isdigit() and len(old) < 20 else rng.randrange(2**32)
        return rng.choice(
            (
                lambda: rng.randbytes(rng.choice((1, 8, 32))),
                lambda: b"",
                lambda: rng.randbytes(HUGE),
                lambda: str(number + rng.choice((-1, 1))).encode(),
                lambda: str(rng.randrange(number + 1)).encode(),
                lambda: str(-number).encode(),
                lambda: _with_a_byte_changed(old, rng),
            )
        )()

    def _score(self, old: float) -> float:
        return self._rng.choice((0.0, -1.0, old + 1, old - 1, float("inf"), self._rng.random() * 2**40))


def _with_a_byte_changed(old: bytes, rng: random.Random) -> bytes:
    if not old:
        return b"\0"
    at = rng.randrange(len(old))
    return old[:at] + rng.randbytes(1) + old[at + 1 :]
