"""Generates the requests of the load test. A request depends only on the workload and its number. Does no I/O.

Lengths are drawn from lognormal distributions. Some of the prompts begin with one of a few common prefixes, as prompts
with system prompts and few-shot examples do.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path

AZURE_TRACE = Path(__file__).parent / "traces" / "azure_conversation_2023_1000.csv"
MOONCAKE_TRACE = AZURE_TRACE.with_name("mooncake_conversation.jsonl.xz")


@dataclass(frozen=True, slots=True)
class Lengths:
    """A lognormal distribution of lengths in tokens, limited to [1, most]."""

    median: float
    sigma: float
    """The standard deviation of the logarithm."""
    most: int

    @classmethod
    def of_mean(cls, mean: float, sigma: float, most: int) -> Lengths:
        """Returns the distribution whose lengths, limited to `most`, have this mean before rounding. Raises ValueError
        if `most` is too small for this mean.
        """
        low, high = 0.0, math.log(most) + 8 * sigma
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if _cut_mean(middle, sigma, most) < mean else (low, middle)
        if abs(_cut_mean(low, sigma, most) - mean) > 0.01 * mean:
            raise ValueError(f"lengths of at most {most} cannot have a mean of {mean} with sigma {sigma}")
        return cls(math.exp(low), sigma, most)

    def draw(self, rng: random.Random) -> int:
        return max(1, min(self.most, round(rng.lognormvariate(math.log(self.median), self.sigma))))


@dataclass(frozen=True, slots=True)
class Request:
    """A request of the load test: its prompt and its parameters."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Workload:
    """A seeded stream of requests for a model with `vocab_size` token ids."""

    seed: int
    vocab_size: int
    max_model_len: int
    prompt: Lengths = Lengths(median=96.0, sigma=0.8, most=1024)
    output: Lengths = Lengths(median=32.0, sigma=0.6, most=256)
    shared_share: float = 0.5
    """The share of the prompts that begin with a common prefix."""
    num_prefixes: int = 4
    prefix_len: int = 64
    first_token_id: int = 16
    """Smaller ids, which are usually special tokens, are not drawn."""

    def request(self, number: int) -> Request:
        """Returns request `number` (from 0), which depends only on the workload and the number."""
        rng = random.Random(f"{self.seed}/{number}")
        prompt_len = self.prompt.draw(rng)
        output_len = max(1, min(self.output.draw(rng), self.max_model_len // 2))
        prompt_len = max(1, min(prompt_len, self.max_model_len - output_len))
        prefix = self._prefix(rng.randrange(self.num_prefixes)) if rng.random() < self.shared_share else ()
        own = max(1, prompt_len - len(prefix))
        prompt = (*prefix[: prompt_len - own], *self._tokens(rng, own))
        return Request(prompt, output_len, rng.randrange(1 << 31))

    def _prefix(self, index: int) -> tuple[int, ...]:
        return self._tokens(random.Random(f"{self.seed}/prefix/{index}"), self.prefix_len)

    def _tokens(self, rng: random.Random, count: int) -> tuple[int, ...]:
        first = min(self.first_token_id, self.vocab_size - 1)
        return tuple(rng.randrange(first, self.vocab_size) for _ in range(count))


def _cut_mean(mu: float, sigma: float, most: int) -> float:
    """Returns the mean of min(X, most), where log X is normal (mu, sigma)."""
    reach = (math.log(most) - mu) / sigma
    return math.exp(mu + sigma**2 / 2) * _normal_cdf(reach - sigma) + most * _normal_cdf(-reach)


def _normal_cdf(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2
