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
    """Reports that a step has computed a part of the prompt, or that there is an early ticket."""

    num_computed_tokens: int
    early_ticket: Ticket | None = None


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The token that was drawn for one branch."""

    sample_index: int
    token_id: int
    logprob: TokenLogprob | None
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class Done:
    """The last event of a successful prefill. It contains the next token of each branch, the first candidates of a beam
    search, or an embedding.
    """

    ticket: Ticket | None
    """The ticket of the branches that continue; None if no branch continues."""
    tokens: tuple[FirstToken, ...]
    """One token per branch, in the request's order; empty for a beam search or an embedding."""
    candidates: Candidates | None
    """The first candidates of a beam search; None for other requests."""
    sources: PromptSources
    timings: Timings
    prompt_logprobs: tuple[TokenLogprob, ...]
    load: WorkerLoad
    embedding: Seq[float] = ()
    """The embedding, if the job has a pool; otherwise empty."""


Event = ChunkDone | Done | LooseleafError
Emit = Callable[[Event], None]
