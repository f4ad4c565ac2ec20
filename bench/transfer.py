"""Measures the cost of copying blocks between the block stores of two hosts (`python -m bench.transfer`).

Runs two real stores over this machine's loopback, each with a separate Redis. A pull is everything between the request
and the local ticket: hashes, allocation, copy, digests, seals, hand-over. Its CPU seconds are those of both store
processes; those of their Redis servers are separate. A read is only the request for blocks, the check of the ticket,
the copy and the digests. This process is its receiver, so its CPU seconds are those of one store and of this process.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from block_store.transfer.byte_transport import ByteTransport
from block_store.transfer.source_client import SourceClient
from block_store.transfer.transport import Copy, GrpcTransport
from common import convert
from common.ticket import Ticket
from common.types import BlockRef, KvLayout, KvSpec
from testing.ledger.hosts import Host

LAYOUTS = {
    "20 KiB": KvLayout(16, (KvSpec(num_layers=5, num_kv_heads=4, head_dim=16, dtype="bfloat16"),)),
    "1 MiB": KvLayout(16, (KvSpec(num_layers=16, num_kv_heads=8, head_dim=128, dtype="bfloat16"),)),
}
SINGLE_READS = 5000  # at least 2 s: on virtual machines, the time of a read changes twofold from second to second
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Returns the CPU time that a process has used so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def redis_cpu_s(pid: int) -> float:
    """Returns the CPU time of a store's private Redis server in seconds. `pid` is the store's process id."""
    children = (task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/children"))
    return sum(cpu_s(int(child)) for line in children for child in line.split())


def names(label: str, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{label}/{number}".encode()).digest() for number in range(count)]


def measure(directory: Path, layout: KvLayout, num_bytes: int, rounds: int) -> dict[str, Any]:
    """Pulls `num_bytes` bytes in each round, and then pulls and reads single blocks. Returns the medians of the rates,
    CPU costs and times.
    """
    num_blocks = num_bytes // layout.block_bytes
    a = Host(directory / "a", 2 * num_blocks, layout=layout)
    b = Host(directory / "b", 2 * num_blocks, "--pull-blocks", layout=layout)
    pids = [host.store.process.pid for host in (a, b)]
    rates, costs, redis_costs, singles = list[float](), list[float](), list[float](), list[float]()
    for number in range(rounds + 1):
        blocks, _ = a.fill(names(f"round-{number}", num_blocks))
        ticket = a.hand_over([[blocks]])
        began, used, redis_used = time.perf_counter(), sum(map(cpu_s, pids)), sum(map(redis_cpu_s, pids))
        response = b.pull(a, ticket)
        took, used = time.perf_counter() - began, sum(map(cpu_s, pids)) - used
        redis_used = sum(map(redis_cpu_s, pids)) - redis_used
        assert response.num_pulled == num_blocks
        if number:  # the first round warms up
            rates.append(num_bytes / took / 1e9)
            costs.append(used / num_bytes * 1e9)
            redis_costs.append(redis_used / num_bytes * 1e9)
        b.claim_and_release(convert.ticket_from_pb(response.ticket))
        a.end(ticket)
        a.assert_idle()  # the sweep releases the blocks of a long ticket in parts
    for number in range(100):
        blocks, _ = a.fill(names(f"single-{number}", 1))
        ticket = a.hand_over([[blocks]])
        began = time.perf_counter()
        response = b.pull(a, ticket)
        singles.append((time.perf_counter() - began) * 1e3)
        b.claim_and_release(convert.ticket_from_pb(response.ticket))
        a.end(ticket)
    read_rate, read_cost = read(a, b, num_blocks, rounds)
    one_ms = 1e3 * layout.block_bytes / 1e9 / read(a, b, 1, SINGLE_READS)[0]
    a.stop()
    b.stop()
    return {
        "gb_per_s": round(statistics.median(rates), 3),
        "cpu_s_per_gb": round(statistics.median(costs), 3),
        "redis_cpu_s_per_gb": round(statistics.median(redis_costs), 3),
        "read_gb_per_s": round(read_rate, 3),
        "read_cpu_s_per_gb": round(read_cost, 3),
        "one_block_pull_p50_ms": round(statistics.median(singles), 2),
        "one_block_read_p50_ms": round(one_ms, 2),
    }


def read(a: Host, b: Host, num_blocks: int, rounds: int) -> tuple[float, float]:
    """Reads blocks of `a` into the arena of `b`, `rounds` times. Returns the median rate in GB/s, and the mean CPU cost
    in s/GB of the store and of this process.
    """
    blocks, _ = a.fill(names(f"read-{num_blocks}", num_blocks))
    ticket, into = a.hand_over([[blocks]]), b.held.alloc(num_blocks)
    asyncio.run(read_s(a, b, ticket, blocks, into, 1))  # warms up
    store = a.store.process.pid
    before = time.process_time() + cpu_s(store)
    times = asyncio.run(read_s(a, b, ticket, blocks, into, rounds))
    used = time.process_time() + cpu_s(store) - before
    assert b.arena.read(into[-1].block) == a.arena.read(blocks[-1].block)
    b.held.release(into)
    a.end(ticket)
    num_bytes = num_blocks * a.arena.block_bytes
    return num_bytes / statistics.median(times) / 1e9, used / rounds / num_bytes * 1e9


async def read_s(
    a: Host, b: Host, ticket: Ticket, blocks: list[BlockRef], into: list[BlockRef], rounds: int
) -> list[float]:
    """Returns the duration of each read in seconds."""
    sources, times = SourceClient(), list[float]()
    transport = ByteTransport(sources, GrpcTransport(sources), 1)
    await sources.keep(a.store.address, ticket)  # the reply contains the port of the byte channels
    for _ in range(rounds):
        began = time.perf_counter()
        await transport.fetch(Copy(a.store.address, ticket, blocks, into, b.arena))
        times.append(time.perf_counter() - began)
    assert not transport.fallbacks.counts
    await transport.close()
    await sources.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.transfer", description=__doc__)
    parser.add_argument("--bytes", type=int, default=256 << 20, help="bytes of blocks in a ticket")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="ll-transfer-") as directory:
        for name, layout in LAYOUTS.items():
            found[name] = measure(Path(directory) / name.replace(" ", ""), layout, args.bytes, args.rounds)
            print(f"blocks of {name}: {found[name]}")
    print(json.dumps({"bench": "transfer", "bytes": args.bytes, "blocks": found}))


if __name__ == "__main__":
    main()
