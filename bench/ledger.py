"""Times the ledger operations of a request whose block table has 64 blocks, and compares each with a PING
(`python -m bench.ledger`).

Times are those of complete calls, in microseconds, including the round trip to Redis. Steps without Redis, such as
hashing, are timed too. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from block_store.arena.arena import Arena, ref_arrays
from block_store.ledger.codec import SealItem
from block_store.ledger.prefix_hash import chain_start, hash_blocks
from block_store.ledger.prefix_lengths import PrefixLengths
from block_store.ledger.rebuild import open_ledger
from block_store.ledger.scripts import CHUNK, CallId, LedgerScripts
from block_store.redis import redis_server
from common.types import Epoch, KvLayout, KvSpec

LAYOUT = KvLayout(16, (KvSpec(num_layers=12, num_kv_heads=4, head_dim=64, dtype="bfloat16"),))
NUM_BLOCKS = 1024
LEASE_S = 3600.0
"""The length of a lease in seconds. A run must be shorter, because the decode holder's lease is not renewed."""
PINGS_WANTED = 5.0
"""The target for the median time of an operation on 64 blocks, in multiples of the median PING of the same run."""
T = TypeVar("T")


class Bench:
    """A prefill holder and a decode holder. Each round makes the ledger calls of one request."""

    def __init__(self, arena: Arena, ledger: LedgerScripts, table_len: int) -> None:
        self.times: dict[str, list[float]] = defaultdict(list)
        self._arena = arena
        self._ledger = ledger
        self._table_len = table_len
        self._lengths = PrefixLengths(ledger.client)
        self._numbers: dict[Epoch, int] = defaultdict(int)
        names = ("prefill", "decode")
        self._prefill, self._decode = (ledger.register(name, writer_slot=1, lease_s=LEASE_S) for name in names)

    def _timed(self, name: str, call: Callable[[], T]) -> T:
        started = time.perf_counter_ns()
        answer = call()
        self.times[name].append((time.perf_counter_ns() - started) / 1000)
        return answer

    def _lane(self, epoch: Epoch) -> CallId:
        self._numbers[epoch] += 1
        return CallId(epoch, self._numbers[epoch])

    def round(self, number: int) -> None:
        ledger, arena, prefill, decode = self._ledger, self._arena, self._prefill, self._decode
        lengths = self._lengths
        tokens = [number, *range(self._table_len * 16 - 1)]
        hashes = self._timed("(hash)", lambda: hash_blocks(chain_start(b"bench"), tokens, 16))
        self._timed("ping", ledger.client.ping)
        self._timed("beat", lambda: ledger.beat(prefill, LEASE_S))
        refs = self._timed("alloc", lambda: ledger.alloc(self._lane(prefill), self._table_len))
        self._timed("(raise)", lambda: arena.raise_generations(refs, 1))
        digests = self._timed("(digest)", lambda: [arena.digest(ref.block) for ref in refs])
        self._timed("(mark)", lambda: arena.mark_sealed(refs, hashes, digests))
        ids, generations = ref_arrays(refs)
        self._timed("(check)", lambda: arena.check(ids, generations))
        items = [SealItem(*pair) for pair in zip(refs, hashes, strict=True)]
        self._timed("seal", lambda: ledger.seal(self._lane(prefill), items))
        ticket = self._timed("hand_over", lambda: ledger.hand_over(self._lane(prefill), refs))
        ledger.release(self._lane(prefill), refs)
        self._timed("claim", lambda: ledger.claim(self._lane(decode), ticket))
        self._timed("lookup", lambda: lengths.find([ledger], hashes))
        self._timed("release", lambda: ledger.release(self._lane(decode), refs))
        self._timed("acquire", lambda: ledger.acquire(self._lane(decode), [hashes]))
        ledger.release(self._lane(decode), refs)
        self._timed("reap", ledger.reap)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.ledger")
    parser.add_argument("--url", help="Redis to use; default: a private one")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--table-len", type=int, default=64, help=f"blocks per call, at most {CHUNK}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="looseleaf-bench-") as directory:
        redis = redis_server.connect(options.url, directory)
        arena = Arena.create(Path(directory), LAYOUT, max(NUM_BLOCKS, 2 * options.table_len))
        ledger = open_ledger(redis.client, arena)
        bench = Bench(arena, ledger, options.table_len)
        for number in range(options.rounds):
            bench.round(number)
        ledger.forget()
        redis.close()
    result = {
        name: {"p50_us": round(statistics.median(times), 1), "p99_us": round(sorted(times)[len(times) * 99 // 100], 1)}
        for name, times in bench.times.items()
    }
    _print_table(result, options.table_len)
    print(json.dumps({"table_len": options.table_len, "redis": redis.version, **result}))


def _print_table(result: dict[str, dict[str, float]], table_len: int) -> None:
    """Prints the table. Its last column is the median time of an operation in multiples of a PING."""
    print(f"{'operation':<12}{'p50 us':>10}{'p99 us':>10}{'pings':>8}   ({table_len} blocks; in parentheses: no Redis)")
    for name, row in result.items():
        pings = row["p50_us"] / result["ping"]["p50_us"]
        told = f"{pings:>8.1f}" + ("" if pings <= PINGS_WANTED else f"  > {PINGS_WANTED:g}")
        print(f"{name:<12}{row['p50_us']:>10}{row['p99_us']:>10}{'' if name.startswith('(') else told}")


if __name__ == "__main__":
    main()
