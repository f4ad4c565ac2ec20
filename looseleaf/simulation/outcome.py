"""The outcome of a request, simulated or measured."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one request for its client. Times are seconds since the start of the trace."""

    arrived_s: float
    token_times: tuple[float, ...] = ()
    refusal: str = ""
    """Why the request was refused; empty if it was not."""
    cached_tokens: int = 0
    copied_tokens: int = 0
    preemptions: int = 0

    @property
    def ttft_s(self) -> float:
        return self.token_times[0] - self.arrived_s

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in pairwise(self.token_times)]

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first, or 0.0 if there is only one token."""
        return (self.token_times[-1] - self.token_times[0]) / max(1, len(self.token_times) - 1)
