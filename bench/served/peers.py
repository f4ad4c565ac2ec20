"""Compares Looseleaf with alternative engines (`make bench-peers PEERS=<harness> ROOT=<environments>`).

Starts `looseleaf serve`, colocated and split, and the server of every installed peer. Runs the harness's load client
against each in interleaved repetitions, and measures the effect of a long prompt on running decodes. Runs the same
requests in transformers in three ways, and compares outputs. Prints medians, the ratio to the best peer for each goal,
and the peers that are not installed or fail. The last line is JSON.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from bench.served import machine, peers_report
from bench.served.peers_load import Failed, Load, transformers_rows
from bench.served.peers_report import BOTH, PEERS, QUANTIZED, SPLIT, UNQUANTIZED
from bench.served.peers_rounds import GROUPS, Rounds
from bench.served.peers_servers import Harness, Target, check, first_token_s, our_server, peer_server
from bench.served.startup import memory, weights_bytes
from common.errors import StartupError
from common.settings import Settings, settings_config

MOST_BEYOND_MIB, MOST_FIRST_TOKEN_S = 1024.0, 5.0
APART_S = 900.0
"""The time in seconds reserved for transformers, the S model and quantized weights. The rounds use the remaining
time.
"""
TRANSFORMERS_LIMIT_S = 600.0
"""The time limit in seconds for each of the ways in which transformers runs without a server. A static batch runs until
its longest output is complete.
"""


class PeersSettings(Settings):
    """The settings of a comparison of Looseleaf with the peers that are installed under `root`."""

    model_config = settings_config("LOOSELEAF_PEERS_", "bench.served.peers")

    peers: Path = Field(description="folder of the peers' harness (run_peer.py, client.py)")
    root: Path = Field(description="what its README sets up: models, gguf, an environment for each peer")
    only: list[str] = Field([], description="peers to run, of those installed; default: all")
    parts: list[Literal["prefill", "decode", "served", "prefix", "gap", "small", "quantized", "transformers"]] = Field(
        ["prefill", "decode", "served", "prefix", "gap", "small", "quantized", "transformers"],
        description="what to measure; small: the served workload on S against vLLM; quantized: decode with weights of "
        "8 and 4 bits against llama.cpp's Q8_0 and Q4_0",
    )
    bits: list[Literal["int8", "int4"]] = Field(["int8", "int4"], description="which weights `quantized` compares")
    rounds: int = Field(3, ge=1, description="repetitions of each test; their median is compared")
    minutes: float = Field(60.0, gt=0, description="no repetition begins that would end later")
    requests: int = Field(64, ge=1, description="requests of the served workloads")
    transformers_requests: int = Field(32, ge=16, le=64, description="how many of them transformers serves")
    quiet: float = Field(10.0, ge=0, description="longest wait for an idle machine before a measurement, s")
    quick: bool = Field(False, description="a rehearsal on S: one round, few requests, nothing kept")
    keep: bool = Field(True, description="write the result below docs/benchmarks/cpu")


def start_all(rounds: Rounds, roles: Sequence[str], peers: Sequence[str], stack: ExitStack, logs: Path) -> list[Target]:
    """Starts our servers and the installed peers. Records peers that are not installed or do not become ready as
    failures.
    """
    targets, harness = [], rounds.harness
    for ours in roles:
        log = logs / f"looseleaf-{ours}-{harness.size}.log"
        targets.append(stack.enter_context(our_server(harness.model, ours, log)))
    targets.extend(start_peers(rounds, peers, stack, logs))
    for target in targets:
        print(f"{target.name} {harness.size}: up after {target.startup_s:.1f} s", flush=True)
    for name, why in rounds.failures.items():
        print(f"{name}: {why}", flush=True)
    return targets


def start_peers(rounds: Rounds, peers: Sequence[str], stack: ExitStack, logs: Path) -> list[Target]:
    """Starts the installed peers. Records those that are not installed or do not become ready as failures."""
    targets, harness = list[Target](), rounds.harness
    for peer in peers:
        if why := harness.missing(peer):
            rounds.failures[f"{peer} {harness.size}"] = f"not installed: {why}"
            continue
        if peer == "openvino":  # runs inside the client's process
            targets.append(Target(peer))
            continue
        try:
            server = peer_server(harness, peer, logs / f"{peer}-{harness.size}.log")
            targets.append(stack.enter_context(server))
        except StartupError as error:
            rounds.failures[f"{peer} {harness.size}"] = str(error)
    return targets


def wanted_peers(settings: PeersSettings) -> list[str]:
    return [peer for peer in PEERS if not settings.only or peer in settings.only]


def compare(rounds: Rounds, settings: PeersSettings, logs: Path) -> dict[str, Any]:
    """Runs the chosen tests on the harness's model. Returns the start-up times, the memory of our servers and the
    comparison of outputs. The other results are in `rounds`.
    """
    groups = [group for group in GROUPS if group in settings.parts]
    if not groups:
        return {"rounds": 0, "first_token_s": None, "startup_s": {}, "memory_mib": {}, "same_chars": {}}
    first_token = first_token_s(rounds.harness.model)
    with ExitStack() as stack:
        targets = start_all(rounds, ("both", "split"), wanted_peers(settings), stack, logs)
        done = rounds.run(targets, settings.rounds, groups)
        bytes_once = weights_bytes(str(rounds.harness.model))
        ours = [target for target in targets if target.name in (BOTH, SPLIT)]
        return {
            "rounds": done,
            "first_token_s": round(first_token, 2),
            "startup_s": {target.name: round(target.startup_s, 2) for target in targets if target.url},
            "memory_mib": {target.name: memory(target.pid, bytes_once).row() for target in ours},
            "same_chars": {target.name: rounds.quality(target) for target in targets if target.url},
        }


def compare_s(rounds: Rounds, settings: PeersSettings, logs: Path) -> None:
    """Runs the served workload on model S in separate rounds. Compares only with vLLM."""
    small = Rounds(replace(rounds.harness, size="S"), rounds.load, rounds.deadline + APART_S)
    small.rows, small.failures = rounds.rows, rounds.failures
    with ExitStack() as stack:
        peers = [peer for peer in wanted_peers(settings) if peer == "vllm"]
        targets = start_all(small, ("both",), peers, stack, logs)
        small.run(targets, settings.rounds, ("served",))


def compare_quantized(rounds: Rounds, settings: PeersSettings, logs: Path) -> None:
    """Runs the decode tests with weights of 8 and of 4 bits, ours and llama.cpp's, and with our unquantized weights, in
    separate rounds.
    """
    apart = Rounds(rounds.harness, rounds.load, rounds.deadline + APART_S)
    apart.rows, apart.failures = rounds.rows, rounds.failures
    with ExitStack() as stack:
        targets = start_peers(apart, [QUANTIZED[bits][1] for bits in settings.bits], stack, logs)
        ours = {UNQUANTIZED: ()} | {QUANTIZED[bits][0]: ("--quantization", bits) for bits in settings.bits}
        for name, flags in ours.items():
            server = our_server(apart.harness.model, "both", logs / f"{name}.log", flags, name)
            targets.append(stack.enter_context(server))
        apart.run(targets, settings.rounds, ("decode",))


def same_in_float32(harness: Harness, rounds: Rounds, logs: Path) -> dict[str, int] | None:
    """Compares our output in float32 with that of transformers. Returns the number of equal characters and the number
    of all characters; the two must agree. Returns None if the comparison fails.
    """
    exact = replace(harness, dtype="float32")
    with our_server(exact.model, "both", logs / "looseleaf-float32.log", ("--dtype", "float32")) as target:
        return rounds.quality(target)


def transformers(rounds: Rounds, settings: PeersSettings, logs: Path) -> None:
    """Runs the served workload in transformers: one request after another, in static batches of 16, and with its
    continuous batching.
    """
    harness, dtype = rounds.harness, "bfloat16"
    if why := harness.missing("transformers"):
        rounds.failures["transformers"] = f"not installed: {why}"
        return
    for way, requests in (("alone", settings.transformers_requests // 4), ("static", settings.transformers_requests)):
        try:
            for row in transformers_rows(harness, way, requests, TRANSFORMERS_LIMIT_S):
                rounds.add(row)
                dtype = row["model"].split("-")[1]
        except Failed as error:
            rounds.failures[f"transformers-{way}"] = str(error)
    faster = replace(harness, dtype=dtype)
    apart = Rounds(faster, replace(rounds.load, requests=settings.transformers_requests), rounds.deadline)
    apart.rows, apart.failures = rounds.rows, rounds.failures
    try:
        with peer_server(faster, "transformers", logs / "transformers.log") as target:
            apart.run([target], 1, ("served",))
    except StartupError as error:
        rounds.failures["transformers"] = str(error)


def conclude(rounds: Rounds, found: dict[str, Any], origin: dict[str, Any]) -> dict[str, Any]:
    """Prints medians, goals and failures. Returns the result."""
    repetitions = peers_report.repetitions(rounds.rows)
    medians = peers_report.medians(repetitions)
    beyond = found["memory_mib"].get(BOTH, {}).get("beyond"), found["memory_mib"].get(SPLIT, {}).get("beyond")
    figures = [
        *peers_report.figures(repetitions, rounds.harness.size),
        peers_report.absolute("memory beyond weights and KV, colocated", beyond[0], MOST_BEYOND_MIB, "MiB"),
        peers_report.absolute("memory beyond weights and KV, split", beyond[1], MOST_BEYOND_MIB, "MiB"),
        peers_report.absolute("serve to first token", found["first_token_s"], MOST_FIRST_TOKEN_S, "s"),
    ]
    busy, told = peers_report.disturbed(rounds.rows)
    print(f"\n{origin}\n\n{peers_report.medians_table(medians)}\n\n{peers_report.table(figures)}\n")
    print(f"same characters as transformers in float32: {found['same_chars']}")
    print(f"{busy} of {told} repetitions during which other processes used more than 0.2 cores")
    for name, why in rounds.failures.items():
        print(f"not measured: {name}: {why}")
    rows = peers_report.rows_of(figures)
    return {
        "benchmark": "peers", **found, "disturbed": [busy, told], "failures": rounds.failures, "figures": rows,
        "rows": list(rounds.rows),
    }  # fmt: skip


def main(settings: PeersSettings) -> int:
    """Runs the chosen parts. Returns exit status 1 if outputs in float32 differ from those of transformers. A missed
    goal does not count as an error.
    """
    if settings.quick:
        smaller = {"rounds": 1, "requests": 8, "transformers_requests": 16, "quiet": 0.0, "keep": False}
        settings = settings.model_copy(update=smaller)
    harness = Harness(settings.peers.resolve(), settings.root.resolve(), "S" if settings.quick else "M")
    check(harness)
    started, origin = time.monotonic(), machine.provenance()
    load = Load(requests=settings.requests, quiet_s=settings.quiet)
    deadline = started + 60.0 * settings.minutes - APART_S
    rounds = Rounds(harness, load, deadline, prompt_len=1024 if settings.quick else 4095)
    with tempfile.TemporaryDirectory(prefix="looseleaf-peers-") as scratch:
        found = compare(rounds, settings, Path(scratch))
        exact = same_in_float32(harness, rounds, Path(scratch)) if found["rounds"] else None
        found["same_chars"]["looseleaf-float32"] = exact
        if "small" in settings.parts and not settings.quick:
            compare_s(rounds, settings, Path(scratch))
        if "quantized" in settings.parts:
            compare_quantized(rounds, settings, Path(scratch))
        if "transformers" in settings.parts:
            transformers(rounds, settings, Path(scratch))
    result = conclude(rounds, found, origin)
    result["minutes"] = round((time.monotonic() - started) / 60, 1)
    if settings.keep:
        only = settings.bits if settings.parts == ["quantized"] else []
        print(f"kept as {machine.keep('-'.join(['peers', *only]), result, origin)}")
    print(json.dumps({name: value for name, value in {**origin, **result}.items() if name != "rows"}))
    return int(exact is not None and exact["same_chars"] != exact["of"])


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are stopped too
    try:
        sys.exit(main(PeersSettings.load(sys.argv[1:])))
    except StartupError as error:
        print(f"bench.served.peers: {error}", file=sys.stderr)
        sys.exit(1)
