"""Writes the load test's workload as a trace: `python -m loadtest.as_trace --rate 4 > trace.jsonl`.

`looseleaf simulate` reads the file. The lines are in Mooncake's format; common prefixes have equal hash ids.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

from pydantic import Field

from common.settings import Settings, settings_config
from loadtest.workload import Workload
from looseleaf.simulation.trace import TraceRequest, mooncake_line


class AsTraceSettings(Settings):
    """Flags of `python -m loadtest.as_trace`."""

    model_config = settings_config("LOOSELEAF_AS_TRACE_", "loadtest.as_trace")

    requests: int = Field(200, ge=1, description="number of requests")
    rate: float = Field(4.0, gt=0, description="mean number of requests per second, which arrive at random")
    seed: int = Field(0, description="seed of the workload and of the arrivals")


def as_trace(workload: Workload, count: int, rate: float) -> Iterator[TraceRequest]:
    """Yields the first `count` requests of `workload`, with exponential gaps that average 1 / `rate` seconds. Prompts
    are divided into runs of `workload.prefix_len` tokens. Runs have the same id if the prompts are equal up to their
    ends.
    """
    rng, at_s = random.Random(f"{workload.seed}/arrivals"), 0.0
    ids: dict[tuple[int, ...], int] = {}
    for number in range(count):
        request = workload.request(number)
        prompt, size = request.prompt_ids, workload.prefix_len
        ends = [min(start + size, len(prompt)) for start in range(0, len(prompt), size)]
        runs = [
            (ids.setdefault(prompt[:end], len(ids)), end - start)
            for start, end in zip([0, *ends[:-1]], ends, strict=True)
        ]
        yield TraceRequest(at_s, tuple(runs), request.max_tokens)
        at_s += rng.expovariate(rate)


def main(settings: AsTraceSettings) -> None:
    workload = Workload(settings.seed, vocab_size=2048, max_model_len=2048)
    for request in as_trace(workload, settings.requests, settings.rate):
        print(mooncake_line(request))


if __name__ == "__main__":
    main(AsTraceSettings.load(sys.argv[1:]))
