"""`python -m bench.transfer`: measures the cost of copying blocks from one host's block store to another's.

Runs two real stores over this machine's loopback, each with a separate Redis. A pull is everything between the request
and the local ticket: hashes, allocation, copy, digests, seals, hand-over. CPU seconds are those of both store
processes. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from common import convert
from common.types import KvLayout, KvSpec
from testing.ledger.hosts import Host

LAYOUTS = {
    "20 KiB": KvLayout(16, (KvSpec(num_layers=5, num_kv_heads=4, head_dim=16, dtype="bfloat16"),)),
    "1 MiB": KvLayout(16, (KvSpec(num_layers=16, num_kv_heads=8, head_dim=128, dtype="bfloat16"),)),
}
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Returns the CPU time that a process has used so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def names(label: str, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{label}/{number}".encode()).digest() for number in range(count)]


def measure(directory: Path, layout: KvLayout, num_bytes: int, rounds: int) -> dict[str, Any]:
    """Copies `num_bytes` once per round, and then single blocks. Returns the medians."""
    num_blocks = num_bytes // layout.block_bytes
    a = Host(directory / "a", 2 * num_blocks, layout=layout)
    b = Host(directory / "b", 2 * num_blocks, "--pull-blocks", layout=layout)
    pids = [host.store.process.pid for host in (a, b)]
    rates, costs, singles = list[float](), list[float](), list[float]()
    for number in range(rounds + 1):
        blocks, _ = a.fill(names(f"round-{number}", num_blocks))
        ticket = a.hand_over([[blocks]])
        began, used = time.perf_counter(), sum(map(cpu_s, pids))
        response = b.pull(a, ticket)
        took, used = time.perf_counter() - began, sum(map(cpu_s, pids)) - used
        assert response.num_pulled == num_blocks
        if number:  # the first round warms up
            rates.append(num_bytes / took / 1e9)
            costs.append(used / num_bytes * 1e9)
        b.claim_and_release(convert.ticket_from_pb(response.ticket))
        a.end(ticket)
    for number in range(100):
        blocks, _ = a.fill(names(f"single-{number}", 1))
        ticket = a.hand_over([[blocks]])
        began = time.perf_counter()
        response = b.pull(a, ticket)
        singles.append((time.perf_counter() - began) * 1e3)
        b.claim_and_release(convert.ticket_from_pb(response.ticket))
        a.end(ticket)
    a.stop()
    b.stop()
    return {
        "gb_per_s": round(statistics.median(rates), 3),
        "cpu_s_per_gb": round(statistics.median(costs), 3),
        "one_block_p50_ms": round(statistics.median(singles), 2),
    }


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
