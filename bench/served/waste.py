"""Measures unused KV memory (`make bench-waste`).

Serves a tiny random model with fewer blocks than the load needs. Reads the decode worker's blocks after every step, and
the ledger about twenty times a second. The requests are a mix of single sequences (greedy or sampled), several samples,
and beams; some share a prefix. They arrive in a seeded Poisson process. Prints:

* internal waste: slots of used blocks without KV, compared with the theoretical (block_size - 1) / 2 slots per
  sequence;
* utilization while saturated: referenced blocks as a share of all blocks, in the middle of the run, when many requests
  wait (blocks allocated in advance and blocks kept free for a floor do not count as used);
* stranded blocks, which are referenced although no sequence needs them: while requests run (blocks that the decode
  worker holds, but that are in no block table) and after all requests have ended.

The last line is JSON.
"""

from __future__ import annotations

import asyncio
import json
import platform
import random
import statistics
import sys
import time
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from pydantic import Field

from bench.served.server import WatchedServer
from bench.served.steps import StepRecord
from common.errors import StartupError
from common.rpc import open_channel
from common.settings import Settings, settings_config
from engine.tiny import VOCAB_SIZE, make_checkpoint
from loadtest.workload import Lengths, Workload
from looseleaf.client import AsyncClient
from looseleaf.options import GenerateOptions
from protos.v1 import block_store_pb2 as pb
from protos.v1 import block_store_pb2_grpc
from testing.system import assert_nothing_held, trust_at

POLL_S = 0.05
MAX_MODEL_LEN = 768
PROMPT = Lengths.of_mean(280.0, 0.5, 440)
OUTPUT = Lengths.of_mean(240.0, 0.4, 320)
MIX: Sequence[tuple[int, GenerateOptions]] = (
    (50, {"temperature": 0.0}),
    (25, {"temperature": 1.0}),
    (10, {"temperature": 1.0, "n": 2}),
    (5, {"temperature": 1.0, "n": 4}),
    (5, {"beam_width": 2, "n": 1}),
    (5, {"beam_width": 4, "n": 2}),
)
"""The mix of requests: (share in percent, options)."""
SATURATED = (0.2, 0.6)
"""The interval of the measurement, which begins and ends when these shares of the requests have been answered."""


class WasteSettings(Settings):
    """The settings of the benchmark of unused KV memory."""

    model_config = settings_config("LOOSELEAF_WASTE_", "bench.served.waste")

    requests: int = Field(360, ge=10, le=1000, description="number of requests in all")
    rate: float = Field(50.0, gt=0, description="requests per second")
    num_blocks: int = Field(
        4096, ge=300, description="blocks of the arena; the default is a third of what all requests take at once"
    )
    block_size: int = Field(16, ge=1, description="token positions in a block")
    preemption: str | None = Field(None, description="auto, swap or give-back; default: the decode worker's")
    seed: int = Field(0, description="seed of arrivals, lengths and samples")


@dataclass(frozen=True, slots=True)
class Poll:
    """The state of the ledger at one moment."""

    at_ns: int
    referenced: int
    """The number of blocks with a reference, including those allocated in advance."""


async def poll(address: str, polls: list[Poll]) -> None:
    """Reads the ledger's counts every POLL_S seconds until cancelled."""
    shown = trust_at(address).metadata
    async with open_channel(address) as channel:
        stub = cast(Any, block_store_pb2_grpc.BlockStoreServiceStub)(channel)
        while True:
            state = await stub.Inspect(pb.InspectRequest(), timeout=10, metadata=shown)
            polls.append(Poll(time.monotonic_ns(), state.sealed + state.reserved))
            await asyncio.sleep(POLL_S)


async def run_load(address: str, block_store: str, settings: WasteSettings) -> tuple[list[Poll], list[int]]:
    """Sends all requests. Returns the polls, and the sorted times at which requests were answered."""
    rng = random.Random(settings.seed)
    workload = Workload(settings.seed, VOCAB_SIZE, MAX_MODEL_LEN, PROMPT, OUTPUT, shared_share=0.3)
    polls: list[Poll] = []
    answered: list[int] = []

    async def send(client: AsyncClient, number: int, options: GenerateOptions) -> None:
        wanted = workload.request(number)
        own: GenerateOptions = {**options, "max_tokens": wanted.max_tokens, "seed": wanted.seed, "ignore_eos": True}
        await client.generate(wanted.prompt_ids, **own)
        answered.append(time.monotonic_ns())

    async with AsyncClient(address, timeout=3600.0) as client:
        watch = asyncio.create_task(poll(block_store, polls))
        async with asyncio.TaskGroup() as group:
            for number, (_, options) in enumerate(rng.choices(MIX, [parts for parts, _ in MIX], k=settings.requests)):
                group.create_task(send(client, number, options))
                await asyncio.sleep(rng.expovariate(settings.rate))
        watch.cancel()
    return polls, sorted(answered)


def internal_waste(steps: Sequence[StepRecord], block_size: int) -> tuple[float, float, float]:
    """Returns, over all steps, (share of slots without KV in used blocks, that share in theory, mean length of a
    sequence in tokens). In theory, the last block of a sequence has (block_size - 1) / 2 empty slots on average, and no
    other slots are empty.
    """
    slots = block_size * sum(step.own_blocks for step in steps)
    filled = sum(step.filled_slots for step in steps)
    sequences = sum(step.num_running + step.num_waiting for step in steps)
    lost = (block_size - 1) / 2 * sequences
    return 1 - filled / slots, lost / (filled + lost), sum(step.sequence_tokens for step in steps) / sequences


def utilisations(polls: Sequence[Poll], steps: Sequence[StepRecord], num_blocks: int) -> list[float]:
    """Returns the share of used blocks at each poll, excluding the blocks that the decode worker had allocated in
    advance.
    """
    times = [step.at_ns for step in steps]
    reserves = [steps[max(0, bisect(times, item.at_ns) - 1)].reserve_blocks for item in polls]
    return [(item.referenced - ahead) / num_blocks for item, ahead in zip(polls, reserves, strict=True)]


def measure(settings: WasteSettings) -> dict[str, Any]:
    served = {
        "num_blocks": settings.num_blocks,
        "block_size": settings.block_size,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 512,
        "max_queue": settings.requests,
    }
    decode = {} if settings.preemption is None else {"PREEMPTION": settings.preemption}
    with TemporaryDirectory() as model, WatchedServer(str(tiny_model(model)), served, decode) as server:
        polls, answered = asyncio.run(run_load(server.addresses.grpc, server.addresses.block_store, settings))
        rest = assert_nothing_held(server.addresses.block_store)
        steps = server.steps()
        prefills = server.dispatched("prefill")
    begin, end = (answered[int(share * len(answered))] for share in SATURATED)
    busy = [step for step in steps if begin <= step.at_ns < end and step.own_blocks]
    used = utilisations([item for item in polls if begin <= item.at_ns < end], steps, settings.num_blocks)
    waste, theory, mean_len = internal_waste(busy, settings.block_size)
    return {
        "benchmark": "waste",
        "block_size": settings.block_size,
        "num_blocks": settings.num_blocks,
        "steps": len(busy),
        "polls": len(used),
        "mean_len": round(mean_len, 1),
        "internal_waste": round(waste, 4),
        "internal_waste_theory": round(theory, 4),
        "utilisation_mean": round(statistics.fmean(used), 4),
        "utilisation_p5": round(statistics.quantiles(used, n=20)[0], 4),
        "in_no_table_max": max(step.held_blocks - step.own_blocks for step in steps),
        "stranded_at_rest": rest.num_blocks - rest.free - rest.cached - rest.reserved,
        "sequences_running_mean": round(statistics.fmean(step.num_running for step in busy), 1),
        "prefill_floor": sum(h.floor_blocks for h in rest.holders if h.name.startswith("prefill")),
        "swaps": steps[-1].preemption["swapped_groups"],
        "given_back": steps[-1].preemption["given_back_groups"],
        "prefills_per_request": round(prefills / settings.requests, 2),
    }


def tiny_model(directory: str) -> Path:
    """Writes a tiny model with random weights, and returns its directory."""
    return make_checkpoint(directory, dtype=torch.bfloat16, max_position_embeddings=MAX_MODEL_LEN)


def show(found: dict[str, Any]) -> None:
    print(
        f"{found['steps']} steps, {found['sequences_running_mean']} sequences of {found['mean_len']} tokens at a time"
    )
    print(f"internal waste      {found['internal_waste']:8.2%}   in theory {found['internal_waste_theory']:.2%}")
    print(f"utilisation         {found['utilisation_mean']:8.2%}   5 % of the time below {found['utilisation_p5']:.2%}")
    kept = found["prefill_floor"] / found["num_blocks"]
    print(f"prefill's floor     {kept:8.2%}   kept free for the next prompt")
    print(f"held, in no table   {found['in_no_table_max']:8}   most after any step")
    print(f"stranded at rest    {found['stranded_at_rest']:8}   of {found['num_blocks']} blocks")
    print(f"preempted groups    {found['swaps']:8}   swapped, {found['given_back']} given back")


def main(settings: WasteSettings) -> None:
    found = measure(settings)
    show(found)
    print(json.dumps(found | {"machine": platform.processor() or platform.machine()}))


if __name__ == "__main__":
    try:
        main(WasteSettings.load(sys.argv[1:]))
    except StartupError as error:
        print(f"bench.served.waste: {error}", file=sys.stderr)
        sys.exit(1)
