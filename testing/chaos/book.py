"""Makes the requests of a chaos run from a seed. Some requests share prefixes. Their correct answers come from the
oracle, a single process with a batch of one and no cache.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from common.types import SamplingParams, StoppingParams
from engine.model_runner import ModelRunner, RunnerSettings
from engine.tiny import make_checkpoint
from looseleaf.options import GenerateOptions
from testing.oracle import Oracle

PREFIX_LENGTHS = (0, 15, 16, 17, 32, 48, 100)
"""The lengths of the shared prefixes. Bookkeeping errors tend to occur at block boundaries and next to them."""
TAIL_LENGTHS = (1, 60)
OUTPUT_LENGTHS = (16, 256)
MAX_MODEL_LEN = 512
"""The maximum length of prompt and output in tokens. The longest case has 100 + 60 + 256 tokens."""
GROUP_WIDTH = 3
"""The number of samples or beams of every fourth case."""
_KINDS = ("greedy", "drawn", "greedy", "samples", "drawn", "greedy", "drawn", "beams")


@dataclass(frozen=True, slots=True)
class Case:
    """A request and its only correct answer."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    expected: tuple[tuple[int, ...], ...]
    """The tokens of each sample, or of each beam with the best first. Empty if the request must be refused."""

    @property
    def streamed(self) -> bool:
        """Whether tokens are sent as they are computed. The tokens of a beam search are sent at the end."""
        return self.sampling.beam_width is None

    def options(self, salt: str) -> GenerateOptions:
        """Returns the options with which a client sends the request."""
        options: GenerateOptions = {"max_tokens": self.max_tokens, "ignore_eos": True, "cache_salt": salt}
        options["n"] = self.sampling.num_sequences
        if self.sampling.beam_width is not None:
            options["beam_width"] = self.sampling.beam_width
            return options
        options["temperature"] = self.sampling.temperature
        if self.sampling.temperature > 0:
            options["seed"] = self.sampling.seed
            options["top_p"] = self.sampling.top_p
            options["top_k"] = self.sampling.top_k
            options["repetition_penalty"] = self.sampling.repetition_penalty
        return options


def make_model(directory: Path) -> Path:
    """Writes a tiny random Llama in bf16, and returns its directory. Its weights have a wide distribution, so that a
    wrong KV block is likely to change tokens.
    """
    return make_checkpoint(directory, "llama", seed=1, dtype=torch.bfloat16, max_position_embeddings=2048)


def make_book(
    model: Path,
    num_cases: int,
    *,
    seed: int,
    output_lengths: tuple[int, int] = OUTPUT_LENGTHS,
    max_model_len: int = MAX_MODEL_LEN,
    reduction_parts: int = 1,
) -> list[Case]:
    """Returns `num_cases` cases with the oracle's answers. Of every eight cases, three are greedy, three are sampled,
    one has several samples, and one is a beam search.
    """
    rng, oracle = random.Random(seed), make_oracle(model, max_model_len, reduction_parts)
    heads = [random_ids(rng, max(PREFIX_LENGTHS)) for _ in range(3)]
    return [_case(rng, oracle, heads, _KINDS[number % len(_KINDS)], output_lengths) for number in range(num_cases)]


def make_oracle(model: Path, max_model_len: int = MAX_MODEL_LEN, reduction_parts: int = 1) -> Oracle:
    settings = RunnerSettings(
        model=str(model),
        max_model_len=max_model_len,
        num_threads=1,
        deterministic=True,
        reduction_parts=reduction_parts,
    )
    return Oracle(ModelRunner(settings))


def _case(
    rng: random.Random, oracle: Oracle, heads: Sequence[Sequence[int]], kind: str, output_lengths: tuple[int, int]
) -> Case:
    head = rng.choice(heads)[: rng.choice(PREFIX_LENGTHS)]
    prompt = (*head, *random_ids(rng, rng.randint(*TAIL_LENGTHS)))
    return solve(oracle, prompt, sampling_of(kind, rng), rng.randint(*output_lengths))


def solve(oracle: Oracle, prompt: tuple[int, ...], sampling: SamplingParams, max_tokens: int) -> Case:
    """Returns the case with the oracle's answer."""
    return Case(prompt, sampling, max_tokens, _answer(oracle, prompt, sampling, StoppingParams(max_tokens=max_tokens)))


def _answer(
    oracle: Oracle, prompt: Sequence[int], sampling: SamplingParams, stopping: StoppingParams
) -> tuple[tuple[int, ...], ...]:
    if sampling.beam_width is not None:
        return tuple(tuple(beam.token_ids) for beam in oracle.beam_search(prompt, sampling, stopping))
    samples = range(sampling.num_sequences)
    return tuple(tuple(oracle.generate(prompt, sampling, stopping, sample_index=index)) for index in samples)


def sampling_of(kind: str, rng: random.Random, width: int = GROUP_WIDTH) -> SamplingParams:
    """Returns the parameters of a request of this kind: greedy, drawn, samples or beams. `width` is the number of
    samples or beams.
    """
    if kind == "greedy":
        return SamplingParams(temperature=0.0)
    if kind == "beams":
        return SamplingParams(num_sequences=width, beam_width=width)
    return SamplingParams(
        temperature=0.9,
        top_p=0.95,
        top_k=50,
        seed=rng.getrandbits(31),
        repetition_penalty=1.1,
        num_sequences=width if kind == "samples" else 1,
    )


def random_ids(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(10, 256) for _ in range(length))
