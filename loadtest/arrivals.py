"""Determines what a run sends: requests by number and, for open-loop runs, the time of each. Every process computes the
same list and sends its share of it. Does no I/O except to read a trace.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from common.errors import StartupError
from loadtest.settings import LoadSettings
from loadtest.workload import Lengths, Request, Workload
from looseleaf.simulation import trace
from looseleaf.simulation.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class Shape:
    """A load that varies between 1 and `peak` times its base."""

    kind: str | None
    """"steps" ends after its last step; "spikes" and "diurnal" go on; None is constant."""
    peak: float
    period_s: float
    steps: int
    width_s: float

    @classmethod
    def of(cls, settings: LoadSettings) -> Shape:
        peak = settings.shape_peak if settings.shape else 1.0
        return cls(settings.shape, peak, settings.shape_period, settings.shape_steps, settings.shape_width)

    def factor(self, at_s: float) -> float | None:
        """Returns the load at a time as a multiple of the base, or None after the end."""
        if self.kind == "steps":
            step = int(at_s // self.period_s)
            return 1 + (self.peak - 1) * step / (self.steps - 1) if step < self.steps else None
        if self.kind == "spikes":  # a spike ends its period, so that the run begins with the base
            return self.peak if at_s % self.period_s >= self.period_s - self.width_s else 1.0
        if self.kind == "diurnal":
            return 1 + (self.peak - 1) * (1 - math.cos(2 * math.pi * at_s / self.period_s)) / 2
        return 1.0


class Plan:
    """The requests of a run."""

    def __init__(self, settings: LoadSettings) -> None:
        """Reads the trace, if there is one. Raises StartupError if the trace cannot be read."""
        self._settings = settings
        self._trace: list[TraceRequest] = []
        if settings.trace is not None:
            self._trace = trace.read(
                settings.trace, count=settings.requests, divisor=settings.divide, rate=settings.rate
            )
        self.shape = Shape.of(settings)

    @property
    def digest(self) -> str:
        """A digest of the trace, by which processes can check that they have the same trace."""
        return hashlib.sha256(repr(self._trace).encode()).hexdigest()

    @property
    def num_requests(self) -> int | None:
        """The number of requests, or None if it is not known in advance."""
        return None if self._settings.endless or not self._settings.open_loop else sum(1 for _ in self.arrivals())

    def arrivals(self) -> Iterator[float]:
        """Yields the time of each request of an open-loop run, in seconds since the start, in order of the requests'
        numbers.

        Without a trace, arrivals are a Poisson process whose rate varies with the shape. Raises StartupError if there
        is neither a trace nor a rate.
        """
        if self._trace:
            yield from (request.at_s / (self._settings.speed or 1.0) for request in self._trace)
            return
        if self._settings.rate is None:
            raise StartupError("--rate or --trace: a run of users has no arrivals")
        rng = random.Random(f"{self._settings.seed}/arrivals")
        at_s, count = 0.0, 0
        while (factor := self.shape.factor(at_s)) is not None and count != self._settings.requests:
            if rng.random() < factor / self.shape.peak:
                yield at_s
                count += 1
            at_s += rng.expovariate(self._settings.rate * self.shape.peak)

    def work(self, vocab_size: int, max_model_len: int) -> Work:
        """Returns the requests for a model."""
        settings = self._settings
        drawn = Workload(
            seed=settings.seed,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            prompt=Lengths(settings.prompt_median, 0.8, max_model_len // 2),
            output=Lengths(settings.output_median, 0.6, max_model_len // 4),
            shared_share=settings.shared_share,
        )
        return Work(drawn, self._trace)


class Work:
    """The requests of a run by number."""

    def __init__(self, drawn: Workload, traced: list[TraceRequest]) -> None:
        self._drawn = drawn
        self._traced = traced

    def request(self, number: int) -> tuple[Request, bool]:
        """Returns request `number` (from 0), and whether it was shortened because it does not fit the model."""
        if not self._traced:
            return self._drawn.request(number), False
        item, most = self._traced[number], self._drawn.max_model_len
        prompt = item.token_ids(self._drawn.vocab_size, self._drawn.seed)
        output_len = min(item.output_len, most // 2)
        room = most - output_len
        cut = output_len < item.output_len or room < len(prompt)
        return Request(tuple(prompt[:room]), output_len, number), cut
