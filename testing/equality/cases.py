"""The requests of the equality suite, the oracle's answers to them, and the comparison of answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.types import FinishReason, SamplingParams, StoppingParams, TokenLogprob
from engine.grammar_state import GrammarState
from looseleaf.options import GenerateOptions
from looseleaf.results import Completion
from testing.oracle import Oracle

TOLERANCE = 1e-4
"""The absolute tolerance of log-probabilities and scores."""
_OPTIONS = (
    "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    "logprobs", "beam_width", "length_penalty", "early_stopping",
)  # fmt: skip
KINDS = {
    "greedy": SamplingParams(temperature=0.0, logprobs=2),
    "sampled": SamplingParams(
        temperature=0.9, top_p=0.95, top_k=50, seed=7, repetition_penalty=1.1, presence_penalty=0.2, logprobs=1
    ),
    "n=4": SamplingParams(temperature=1.0, seed=11, num_sequences=4, frequency_penalty=0.3, logprobs=2),
    "n=1 of them": SamplingParams(temperature=1.0, seed=11, frequency_penalty=0.3, logprobs=2),
    "beam 4": SamplingParams(temperature=0.0, num_sequences=4, beam_width=4, length_penalty=0.8, logprobs=2),
}
"""The ways in which tokens are chosen. All kinds request log-probabilities, so that a wrong block is noticed even if it
changes no token.
"""


@dataclass(frozen=True, slots=True)
class Case:
    """A request of the suite."""

    name: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    stopping: StoppingParams

    @property
    def options(self) -> GenerateOptions:
        """The options of the request for a client."""
        given: dict[str, Any] = {name: getattr(self.sampling, name) for name in _OPTIONS}
        if self.sampling.beam_width is None:
            given = {name: value for name, value in given.items() if name not in ("length_penalty", "early_stopping")}
        given |= {"n": self.sampling.num_sequences, "ignore_eos": True, "max_tokens": self.stopping.max_tokens}
        options: Any = given | {"stop_token_ids": self.stopping.stop_token_ids}
        checked: GenerateOptions = {name: value for name, value in options.items() if value is not None}  # type: ignore[assignment]
        return checked


@dataclass(slots=True)
class Text:
    """The output of one sample or beam."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    score: float | None = None
    """The score of a beam."""


Answer = list[Text]
"""The samples by index, or the beams with the best first."""


def make_cases(vocab_size: int, max_tokens: int = 28, lens: Sequence[int] = (37, 32)) -> list[Case]:
    """Returns cases of every kind, with prompts of these lengths. Their first 16 tokens are the same, so that requests
    can share a block.

    Samples can end early, at one of eight stop tokens. `n=1 of them` has the prompts and the seed of `n=4`.
    """
    rng = random.Random(5)
    head = [rng.randrange(10, vocab_size) for _ in range(16)]
    stopping = StoppingParams(max_tokens=max_tokens, stop_token_ids=tuple(rng.sample(range(10, vocab_size), 8)))
    prompts: dict[str, list[tuple[int, ...]]] = {}
    for kind in KINDS:
        prompts[kind] = [(*head, *(rng.randrange(10, vocab_size) for _ in range(length - 16))) for length in lens]
    prompts["n=1 of them"] = prompts["n=4"]
    return [
        Case(f"{kind}, prompt {number}", prompt, sampling, stopping)
        for kind, sampling in KINDS.items()
        for number, prompt in enumerate(prompts[kind])
    ]


def expect(oracle: Oracle, case: Case, begin: Callable[[], GrammarState] | None = None) -> Answer:
    """Returns the oracle's answer. `begin` returns a new state of the grammar, or is None if there is no grammar."""
    prompt, sampling, stopping = list(case.prompt), case.sampling, case.stopping
    if sampling.beam_width is not None:
        best = oracle.beam_search(prompt, sampling, stopping)
        return [Text(list(b.token_ids), list(b.logprobs), b.finish_reason, b.score) for b in best]
    answer = []
    for index in range(sampling.num_sequences):
        drawn = oracle.draw(prompt, sampling, stopping, sample_index=index, begin=begin)
        stopped = drawn[-1].token_id in stopping.stop_token_ids
        stopped = stopped or (begin is not None and begin().is_over([sampled.token_id for sampled in drawn]))
        reason = FinishReason.STOP if stopped else FinishReason.LENGTH
        logprobs = [sampled.logprob for sampled in drawn if sampled.logprob is not None]
        answer.append(Text([sampled.token_id for sampled in drawn], logprobs, reason))
    return answer


def answer_of(done: Completion) -> Answer:
    """Returns the answer in a client's completion."""
    return [Text(list(s.token_ids), list(s.logprobs), s.finish_reason, s.beam_score) for s in done.samples]


def differences(cases: Sequence[Case], expected: Sequence[Answer], found: Sequence[Answer]) -> list[str]:
    """Returns a description of each sample that differs from the expected one, and of each answer with the wrong number
    of samples.
    """
    return [
        f"{case.name}, sample {index}: {difference}"
        for case, wanted, got in zip(cases, expected, found, strict=True)
        for index, difference in enumerate(_all(wanted, got))
        if difference
    ]


def _all(wanted: Answer, got: Answer) -> list[str]:
    if len(wanted) != len(got):
        return [f"{len(got)} samples, not {len(wanted)}"]
    return [_differs(*pair) for pair in zip(wanted, got, strict=True)]


def _differs(wanted: Text, got: Text) -> str:
    """Returns a description of the difference between two texts, or an empty string."""
    if wanted.token_ids != got.token_ids:
        pairs = zip(wanted.token_ids, got.token_ids, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(wanted.token_ids), len(got.token_ids)))
        return f"tokens differ from index {first} on: {wanted.token_ids[first:]} expected, {got.token_ids[first:]}"
    if wanted.finish_reason != got.finish_reason:
        return f"ended by {got.finish_reason}, not {wanted.finish_reason}"
    if (wanted.score is None) != (got.score is None) or not _close(wanted.score or 0.0, got.score or 0.0):
        return f"score {got.score}, not {wanted.score}"
    if len(wanted.logprobs) != len(got.logprobs):
        return f"{len(got.logprobs)} log-probabilities, not {len(wanted.logprobs)}"
    wrong = [i for i, pair in enumerate(zip(wanted.logprobs, got.logprobs, strict=True)) if not _same(*pair)]
    return f"log-probabilities differ at {wrong}" if wrong else ""


def _same(wanted: TokenLogprob, got: TokenLogprob) -> bool:
    ids = [(item.token_id, item.rank, *(token for token, _ in item.top)) for item in (wanted, got)]
    values: list[Iterable[float]] = [(item.logprob, *(value for _, value in item.top)) for item in (wanted, got)]
    return ids[0] == ids[1] and all(map(_close, *values))


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= TOLERANCE
