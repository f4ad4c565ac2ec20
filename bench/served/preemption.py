"""Measures the cost of running out of blocks (`make bench-preemption`).

Serves the built-in model and sends the same requests, all at once, to two arenas. The first has room for all requests.
The second has only a share of the blocks that the requests used in the first, but enough for the largest request.
Groups are therefore swapped to host memory, given back to prefill, or either (auto). This is repeated for several block
sizes. Prints counts and times for both arenas, and the number of requests whose answers differ between them, which must
be zero. The last line is JSON.
"""

from __future__ import annotations

import asyncio
import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from bench.served.server import Request, WatchedServer, send_all
from bench.served.steps import StepRecord
from common.errors import StartupError
from common.group_need import GroupNeed, blocks_of
from common.kv_retention import KvRules
from common.settings import Settings, settings_config
from loadtest.workload import Lengths, Workload
from looseleaf.results import Completion

MAX_MODEL_LEN = 512
WORKLOAD = Workload(0, 2048, MAX_MODEL_LEN, Lengths(112.0, 0.4, 192), Lengths(160.0, 0.4, 256), shared_share=0.0)
MODES = ("swap", "give-back", "auto")


class PreemptionSettings(Settings):
    """The settings of the preemption benchmark."""

    model_config = settings_config("LOOSELEAF_PREEMPTION_", "bench.served.preemption")

    requests: int = Field(32, ge=24, le=250, description="requests, all sent at once; every fourth has two samples")
    block_sizes: list[int] = Field([8, 16, 64], description="token positions in a block")
    share: float = Field(
        0.3, gt=0, lt=1, description="blocks of the small arena, as a share of those that all requests used at once"
    )


@dataclass(frozen=True, slots=True)
class Run:
    """The results of one run of all requests."""

    num_blocks: int
    seconds: float
    answers: list[Completion]
    steps: list[StepRecord]
    prefills: int

    @property
    def most_held(self) -> int:
        """The largest number of blocks that the decode worker's sequences used at one time."""
        return max(step.held_blocks for step in self.steps)


def requests(num: int) -> list[Request]:
    """Returns `num` requests, alternately greedy and sampled. Every fourth request has two samples."""
    found = []
    for number in range(num):
        wanted = WORKLOAD.request(number)
        found.append(
            Request(
                wanted.prompt_ids,
                {
                    "max_tokens": wanted.max_tokens,
                    "seed": wanted.seed,
                    "ignore_eos": True,
                    "temperature": float(number % 2),
                    "n": 2 if number % 4 == 3 else 1,
                },
            )
        )
    return found


def run(block_size: int, num_blocks: int, mode: str, wanted: Sequence[Request]) -> Run:
    served = {"max_model_len": MAX_MODEL_LEN, "num_blocks": num_blocks, "block_size": block_size, "max_num_seqs": 128}
    with WatchedServer(None, served, {"PREEMPTION": mode}) as server:
        asyncio.run(send_all(server.addresses.grpc, wanted[:1], 1))  # warms up; later runs find its prefix
        started, prefills = time.monotonic(), server.dispatched("prefill")
        answers = asyncio.run(send_all(server.addresses.grpc, wanted, len(wanted)))
        seconds = time.monotonic() - started
        return Run(num_blocks, seconds, answers, server.steps(), server.dispatched("prefill") - prefills)


def ample_blocks(wanted: Sequence[Request], block_size: int) -> int:
    """Returns twice the number of blocks that all requests need at full length, because floors may reserve half of the
    arena for other workers.
    """
    lens = [(len(r.prompt_ids) + r.options["max_tokens"]) * r.options["n"] for r in wanted]
    return 2 * sum(-(-length // block_size) + 2 for length in lens)


def least_blocks(wanted: Sequence[Request], block_size: int) -> int:
    """Returns the number of blocks of the smallest arena in which the decode worker accepts each of these requests
    (`sizing.granted_floor`).
    """
    needs = [GroupNeed(len(r.prompt_ids), r.options["max_tokens"], r.options["n"]) for r in wanted]
    largest = max(need.blocks(KvRules(block_size)) for need in needs)
    asked = blocks_of(MAX_MODEL_LEN, block_size) + 1
    return 2 * asked + max(0, 4 * (largest - asked))


def row(mode: str, found: Run, ample: Run) -> dict[str, Any]:
    """Returns the counts and times of one run. Except for `seconds`, times are means per request, or per group that was
    swapped out or back.
    """
    counts = found.steps[-1].preemption
    out, back = max(1.0, counts["swapped_groups"]), max(1.0, counts["resumed_groups"])
    return {
        "mode": mode,
        "blocks": found.num_blocks,
        "seconds": round(found.seconds, 2),
        "ratio": round(found.seconds / ample.seconds, 2),
        "swaps": counts["swapped_groups"],
        "ms_out": round(1e3 * counts["out_s"] / out, 3),
        "ms_in": round(1e3 * counts["in_s"] / back, 3),
        "s_away": round(counts["waited_s"] / back, 2),
        "given_back": counts["given_back_groups"],
        "prefills": found.prefills,
        "prefill_ms": round(statistics.fmean(a.timings.prefill_ns for a in found.answers) / 1e6, 1),
        "decode_ms": round(statistics.fmean(a.timings.decode_ns for a in found.answers) / 1e6, 1),
        "differing": sum(a.samples != b.samples for a, b in zip(found.answers, ample.answers, strict=True)),
    }


def measure(settings: PreemptionSettings) -> list[dict[str, Any]]:
    wanted = requests(settings.requests)
    rows: list[dict[str, Any]] = []
    for block_size in settings.block_sizes:
        ample = run(block_size, ample_blocks(wanted, block_size), "auto", wanted)
        small = max(int(settings.share * ample.most_held), least_blocks(wanted, block_size))
        print(f"block size {block_size}: all at once took {ample.most_held} blocks of the decode worker", flush=True)
        for mode in ("room", *MODES):
            found = ample if mode == "room" else run(block_size, small, mode, wanted)
            rows.append({"block_size": block_size, **row(mode, found, ample)})
            show(rows[-1], header=mode == "room")
    return rows


def show(values: dict[str, Any], *, header: bool) -> None:
    if header:
        print(" ".join(f"{name:>10}" for name in values))
    print(" ".join(f"{value:>10}" for value in values.values()), flush=True)


def main(settings: PreemptionSettings) -> int:
    """Measures and prints the rows. Returns exit status 1 if an answer differs from that of the large arena's run."""
    rows = measure(settings)
    machine = platform.processor() or platform.machine()
    print(json.dumps({"benchmark": "preemption", "rows": rows, "machine": machine}))
    return int(any(values["differing"] for values in rows))


if __name__ == "__main__":
    try:
        sys.exit(main(PreemptionSettings.load(sys.argv[1:])))
    except StartupError as error:
        print(f"bench.served.preemption: {error}", file=sys.stderr)
        sys.exit(1)
