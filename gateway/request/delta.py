"""Defines `Delta`, the output of one sample in one message, and `Summary`, the counts and times of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.types import FinishReason, PromptSources, Timings
from protos.v1 import types_pb2 as pb


@dataclass(frozen=True, slots=True)
class Summary:
    """The token counts, the times and the number of attempts of a request so far."""

    prompt_tokens: int
    completion_tokens: int
    sources: PromptSources
    handed_over_tokens: int
    timings: Timings
    attempts: int


@dataclass(slots=True)
class Delta:
    """The output of one sample in one message. The sample's last delta has `finish_reason`; the request's last delta
    also has `summary`.
    """

    index: int = 0
    """The sample's number, or, in a beam search, the beam's rank."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprob] = field(default_factory=list)
    prompt_logprobs: Sequence[pb.TokenLogprob] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    stop_string: str | None = None
    beam_score: float | None = None
    embedding: Sequence[float] = ()
    """The prompt's embedding, or empty for a request that produces tokens."""
    summary: Summary | None = None
    sources: PromptSources | None = None
    """The sources of the prompt's KV. Only the request's first delta has them."""
    is_first: bool = False
    """Whether this is the sample's first delta. It is set when the delta is sent, as is `is_plain`."""
    is_plain: bool = False
    """Whether the delta is from the middle of a sample and has only tokens and their text. Most deltas are plain."""
