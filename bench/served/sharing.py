"""Measures the sharing of blocks between samples and beams (`make bench-sharing`).

Serves the built-in model on this machine and reads the decode worker's block tables after every step. The first part
measures the blocks saved by sharing: 1 - (different blocks / entries of all block tables), summed over steps. It uses
lengths like those of the PagedAttention paper's data sets, and prints the paper's numbers for comparison. The second
part measures the cost of a request with n samples until the hand-over: prefills, tickets, bytes. The last line is JSON.

Only the mean lengths of the data sets are known (paper, section 6.1). The benchmark assumes a lognormal distribution
with an upper limit. Prompts are beginnings of stories that the model generates. Each request has a different cache
salt, so only samples of the same request share blocks. Outputs run to their full length, as in the paper.
"""

from __future__ import annotations

import asyncio
import json
import platform
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from bench.served.server import STORY_LEN, Request, WatchedServer, send_all, stories
from bench.served.steps import StepRecord
from common.errors import StartupError
from common.settings import Settings, settings_config
from loadtest.workload import Lengths
from looseleaf.options import GenerateOptions
from testing.system import inspect

MAX_NUM_SEQS = 48
SIGMA = 0.8
WIDTHS = (2, 4, 6)
COPIES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class DataSet:
    """Lengths like those of a data set, and the paper's savings for n or a beam width of 2 to 6 (figure 15)."""

    name: str
    prompt: Lengths
    output: Lengths
    paper: Mapping[str, str]


DATA_SETS = (
    DataSet(
        "Alpaca-like",
        Lengths.of_mean(19.31, SIGMA, 128),
        Lengths.of_mean(58.45, SIGMA, 400),
        {"n": "6.1 to 9.8", "beams": "37.6 to 55.2"},
    ),
    DataSet(
        "ShareGPT-like",
        Lengths.of_mean(161.31, SIGMA, STORY_LEN),
        Lengths.of_mean(337.99, SIGMA, 570),
        {"n": "16.2 to 30.5", "beams": "44.3 to 66.3"},
    ),
)


class SharingSettings(Settings):
    """The settings of the sharing benchmark."""

    model_config = settings_config("LOOSELEAF_SHARING_", "bench.served.sharing")

    model: str | None = Field(None, description="model directory of at least 1,024 positions; default: the built-in")
    requests: int = Field(48, ge=1, description="requests of each data set")
    handed_over: int = Field(16, ge=1, description="requests whose hand-over is measured, for each n")
    block_size: int = Field(16, ge=1, description="token positions in a block")
    seed: int = Field(0, description="seed of lengths, prompts and samples")


KINDS: Mapping[str, Callable[[int], GenerateOptions]] = {
    "n": lambda width: {"n": width, "temperature": 1.0},
    "beams": lambda width: {"beam_width": width, "n": 1},
}


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts whose lengths are like those of a data set, their output lengths, and the server that receives them."""

    server: WatchedServer
    prompts: Sequence[Sequence[int]]
    output_lens: Sequence[int]
    seed: int

    def run(self, name: str, width: int, options: GenerateOptions) -> list[StepRecord]:
        """Sends all requests. Returns the records of the decode worker's steps in that time. Runs with different names
        share no blocks.
        """
        requests = []
        for number, (prompt, output_len) in enumerate(zip(self.prompts, self.output_lens, strict=True)):
            own: GenerateOptions = {
                "max_tokens": output_len,
                "seed": self.seed + number,
                "cache_salt": f"{name}/{number}",
            }
            requests.append(Request(prompt, {**options, **own, "ignore_eos": True}))
        started = time.monotonic_ns()
        asyncio.run(send_all(self.server.addresses.grpc, requests, max(1, MAX_NUM_SEQS // width)))
        return self.server.steps(started)


def load_of(server: WatchedServer, data: DataSet, num: int, seed: int) -> Load:
    rng = random.Random(f"{seed}/{data.name}")
    prompt_lens = [data.prompt.draw(rng) for _ in range(num)]
    output_lens = [data.output.draw(rng) for _ in range(num)]
    return Load(server, asyncio.run(stories(server.addresses.grpc, prompt_lens, seed)), output_lens, seed)


def saved_share(steps: Sequence[StepRecord]) -> float:
    """Returns the share of blocks saved over all steps, compared with block tables without sharing."""
    unshared = sum(step.table_blocks for step in steps)
    return 1 - sum(step.own_blocks for step in steps) / unshared


def hand_over(load: Load, n: int, block_bytes: int) -> dict[str, float]:
    """Returns the cost of the hand-over of requests with n samples, and the number of blocks that decode copies
    afterwards. All values are means per request.
    """
    server, num = load.server, len(load.prompts)
    before, dispatched = server.steps()[-1], server.dispatched("prefill")
    steps = load.run(f"hand-over {n}", n, KINDS["n"](n))
    return {
        "n": n,
        "prefills": (server.dispatched("prefill") - dispatched) / num,
        "tickets": (steps[-1].num_tickets - before.num_tickets) / num,
        "ticket_bytes": round((steps[-1].ticket_bytes - before.ticket_bytes) / num, 1),
        "kv_bytes": round((steps[-1].ticket_blocks - before.ticket_blocks) / num * block_bytes),
        "copied_on_write_blocks": round((steps[-1].copied_blocks - before.copied_blocks) / num, 2),
    }


def measure(settings: SharingSettings) -> dict[str, Any]:
    """Serves the model, runs all measurements, and prints and returns the results."""
    served = {
        "max_model_len": 1024, "num_blocks": 8192, "max_num_seqs": MAX_NUM_SEQS, "block_size": settings.block_size,
    }  # fmt: skip
    result: dict[str, Any] = {"benchmark": "sharing", "block_size": settings.block_size}
    with WatchedServer(settings.model, served) as server:
        for data in DATA_SETS:
            load = load_of(server, data, settings.requests, settings.seed)
            lens = [sum(lengths) / settings.requests for lengths in (map(len, load.prompts), load.output_lens)]
            print(f"{data.name}: {settings.requests} requests, mean prompt {lens[0]:.1f}, mean output {lens[1]:.1f}")
            result[data.name] = {
                "mean_prompt": round(lens[0], 2),
                "mean_output": round(lens[1], 2),
                **saved(load, data),
            }
        load = load_of(server, DATA_SETS[1], settings.handed_over, settings.seed + 1)
        state = inspect(server.addresses.block_store)
        result["hand_over"] = [hand_over(load, n, state.block_bytes) for n in COPIES]
    show_hand_over(result["hand_over"])
    return result


def saved(load: Load, data: DataSet) -> dict[str, float]:
    """Returns the percentage of blocks saved, by kind and width. Prints each percentage when it is known."""
    found: dict[str, float] = {}
    for kind, options in KINDS.items():
        for width in WIDTHS:
            share = saved_share(load.run(f"{data.name} {kind} {width}", width, options(width)))
            found[f"{kind}_{width}"] = round(100 * share, 1)
            print(f"  {kind:5} {width}   saved {100 * share:5.1f} %   paper, 2 to 6: {data.paper[kind]} %", flush=True)
    return found


def show_hand_over(rows: Sequence[Mapping[str, float]]) -> None:
    print("per request of n samples (a hand-over names blocks; none of the KV bytes are copied)")
    print("  ".join(f"{name:>12}" for name in rows[0]))
    for row in rows:
        print("  ".join(f"{value:{max(12, len(name))}}" for name, value in row.items()))


def main(settings: SharingSettings) -> None:
    result = measure(settings)
    print(json.dumps(result | {"machine": platform.processor() or platform.machine()}))


if __name__ == "__main__":
    try:
        main(SharingSettings.load(sys.argv[1:]))
    except StartupError as error:
        print(f"bench.served.sharing: {error}", file=sys.stderr)
        sys.exit(1)
