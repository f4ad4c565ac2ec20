"""Requests that arrive at random."""

from __future__ import annotations

import random

from looseleaf.simulation.trace import TraceRequest

Range = tuple[int, int]
"""The smallest and the largest number of tokens."""


def poisson(seed: str, rate: float, seconds: float, prompt: Range, output: Range, least: int = 1) -> list[TraceRequest]:
    """Returns the requests that arrive within `seconds` at a mean of `rate` per second, and at least the first `least`.
    Lengths are drawn uniformly, and every prompt is different.
    """
    rng, at_s, requests = random.Random(seed), 0.0, list[TraceRequest]()
    while True:
        at_s += rng.expovariate(rate)
        if at_s > seconds and len(requests) >= least:
            return requests
        requests.append(TraceRequest(at_s, ((len(requests) + 1, rng.randint(*prompt)),), rng.randint(*output)))
