"""The events of a prefill, which the step thread emits: progress, then the result or an error."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from common.errors import LooseleafError
from common.ticket import Ticket
from common.types import FinishReason, PromptSources, Timings, TokenLogprob, WorkerLoad
from engine.beam_search import Candidates


@dataclass(frozen=True, slots=True)
class ChunkDone:
    """An event: a step has computed part of the prompt."""

    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    """An event: the token that has been drawn for one branch."""

    sample_index: int
    token_id: int
    logprob: TokenLogprob | None
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class Done:
    """The last event: the prompt has been prefilled, and the next token of each branch has been drawn. Without a
    ticket, all branches have ended.
    """

    ticket: Ticket | None
    """Ticket of the branches that continue."""
    tokens: tuple[FirstToken, ...]
    """One per branch, in the request's order; empty for a beam search."""
    candidates: Candidates | None
    """First candidates of a beam search."""
    sources: PromptSources
    timings: Timings
    prompt_logprobs: tuple[TokenLogprob, ...]
    load: WorkerLoad
    embedding: Seq[float] = ()
    """For a job with a pool, instead of tokens."""


Event = ChunkDone | Done | LooseleafError
Emit = Callable[[Event], None]
