"""What is asked in a chaos run, and the right answers: seeded requests with shared prefixes, answered by the oracle.

Knows nothing of services: one process, a batch of one, no cache.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from common.types import SamplingParams, StoppingParams
from engine.oracle import Oracle
from engine.runner import ModelRunner, RunnerSettings
from engine.tiny import make_checkpoint
from looseleaf.options import GenerateOptions

PREFIX_LENGTHS = (0, 15, 16, 17, 32, 48, 100)
"""Lengths of the shared heads; those at and beside a block's border are where bookkeeping goes wrong."""
TAIL_LENGTHS = (1, 60)
OUTPUT_LENGTHS = (16, 256)
MAX_MODEL_LEN = 512
"""Takes the longest head, tail and output, with room for a few more."""


@dataclass(frozen=True, slots=True)
class Case:
    """One request and its one right answer."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    expected: tuple[int, ...]

    def options(self, salt: str) -> GenerateOptions:
        """As a client gives them."""
        options: GenerateOptions = {"max_tokens": self.max_tokens, "ignore_eos": True, "cache_salt": salt}
        options["temperature"] = self.sampling.temperature
        if self.sampling.temperature > 0:
            options["seed"] = self.sampling.seed
            options["top_p"] = self.sampling.top_p
            options["top_k"] = self.sampling.top_k
            options["repetition_penalty"] = self.sampling.repetition_penalty
        return options


def make_model(directory: Path) -> Path:
    """A tiny random Llama in bf16, drawn wide, so that one wrong KV block changes tokens."""
    return make_checkpoint(directory, "llama", seed=1, dtype=torch.bfloat16, max_position_embeddings=2048)


def make_book(
    model: Path, num_cases: int, *, seed: int, output_lengths: tuple[int, int] = OUTPUT_LENGTHS
) -> list[Case]:
    """`num_cases` cases, every other one greedy. Takes about 1.5 ms per output token."""
    rng = random.Random(seed)
    settings = RunnerSettings(model=str(model), max_model_len=MAX_MODEL_LEN, num_threads=1, deterministic=True)
    oracle = Oracle(ModelRunner(settings))
    heads = [_ids(rng, max(PREFIX_LENGTHS)) for _ in range(3)]
    return [_case(rng, oracle, heads, number, output_lengths) for number in range(num_cases)]


def _case(
    rng: random.Random, oracle: Oracle, heads: Sequence[Sequence[int]], number: int, output_lengths: tuple[int, int]
) -> Case:
    head = rng.choice(heads)[: rng.choice(PREFIX_LENGTHS)]
    prompt = (*head, *_ids(rng, rng.randint(*TAIL_LENGTHS)))
    sampling = _greedy() if number % 2 == 0 else _drawn(rng)
    max_tokens = rng.randint(*output_lengths)
    expected = oracle.generate(prompt, sampling, StoppingParams(max_tokens=max_tokens))
    return Case(prompt, sampling, max_tokens, tuple(expected))


def _greedy() -> SamplingParams:
    return SamplingParams(temperature=0.0)


def _drawn(rng: random.Random) -> SamplingParams:
    return SamplingParams(temperature=0.9, top_p=0.95, top_k=50, seed=rng.getrandbits(31), repetition_penalty=1.1)


def _ids(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(10, 256) for _ in range(length))
