"""The explanations that a client receives, as frozen dataclasses, and their conversion from protobuf."""

from __future__ import annotations

from dataclasses import dataclass

from common.convert import sources_from_pb, timings_from_pb
from common.types import PromptSources, Timings
from looseleaf.results import Usage, usage_from_pb
from protos.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class Phase:
    """A period in which a request did one thing or waited for one thing."""

    kind: str
    """The name of a `PhaseKind` in lower case, without its prefix, such as "gate", "prefill" or "swapped"."""
    duration_ns: int
    attempt: int
    """Number of the attempt, from 1; 0 before the first."""


@dataclass(frozen=True, slots=True)
class ConsideredWorker:
    """A worker that routing compared with other workers."""

    worker_id: str
    predicted_s: float
    """Predicted time from the choice until decode begins."""
    missing_tokens: int
    """Number of prompt tokens that are not cached in the worker's arena."""
    delay_s: float
    """Predicted time that sequences lose which decode in the process of this prefill worker, summed over the sequences.
    """
    itl_s: float
    """Predicted mean time between two tokens of the sequences that decode in the worker's process meanwhile, or 0.0."""


@dataclass(frozen=True, slots=True)
class AttemptExplanation:
    """The record of one attempt: its workers, its blocks and its end."""

    prefill_worker: str
    prefill_considered: tuple[ConsideredWorker, ...]
    decode_worker: str
    """The id of the worker that continued the request, or "" if there was none."""
    decode_considered: tuple[ConsideredWorker, ...]
    sources: PromptSources
    handed_over_tokens: int
    handed_over_blocks: int
    arena_id: str
    blocks: tuple[int, ...]
    """The numbers of the handed-over blocks in the arena, at most the first 1,024."""
    generations: tuple[int, ...]
    """The generations of `blocks`."""
    output_tokens: int
    copied_blocks: int
    """Number of blocks that decode copied because they were shared or sealed (copy-on-write)."""
    swapped_out_blocks: int
    swapped_in_blocks: int
    num_swaps: int
    end: str
    """"done", "failed", the reason why the attempt was lost or given back, or "" if the attempt has not ended."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The record of one request. The durations of its phases add up to `total_ns`. The timings are sums of the times
    that the workers reported.
    """

    request_id: str
    received_unix_ns: int
    outcome: str
    """"running", a finish reason, or "error"."""
    error: str
    num_sequences: int
    usage: Usage | None
    """None while the request runs. The same applies to `timings`."""
    timings: Timings | None
    total_ns: int
    first_token_ns: int | None
    phases: tuple[Phase, ...]
    attempts: tuple[AttemptExplanation, ...]


def explanation_from_pb(message: pb.Explanation) -> Explanation:
    return Explanation(
        request_id=message.request_id,
        received_unix_ns=message.received_unix_ns,
        outcome=message.outcome,
        error=message.error,
        num_sequences=message.num_sequences,
        usage=usage_from_pb(message.usage) if message.HasField("usage") else None,
        timings=timings_from_pb(message.timings) if message.HasField("timings") else None,
        total_ns=message.total_ns,
        first_token_ns=message.first_token_ns if message.HasField("first_token_ns") else None,
        phases=tuple(Phase(_kind_name(p.kind), p.duration_ns, p.attempt) for p in message.phases),
        attempts=tuple(map(_attempt, message.attempts)),
    )


def _attempt(message: pb.AttemptExplanation) -> AttemptExplanation:
    return AttemptExplanation(
        prefill_worker=message.prefill_worker,
        prefill_considered=tuple(map(_considered, message.prefill_considered)),
        decode_worker=message.decode_worker,
        decode_considered=tuple(map(_considered, message.decode_considered)),
        sources=sources_from_pb(message.sources),
        handed_over_tokens=message.handed_over_tokens,
        handed_over_blocks=message.handed_over_blocks,
        arena_id=message.arena_id,
        blocks=tuple(message.blocks),
        generations=tuple(message.generations),
        output_tokens=message.output_tokens,
        copied_blocks=message.copied_blocks,
        swapped_out_blocks=message.swapped_out_blocks,
        swapped_in_blocks=message.swapped_in_blocks,
        num_swaps=message.num_swaps,
        end=message.end,
    )


def _considered(message: pb.ConsideredWorker) -> ConsideredWorker:
    return ConsideredWorker(
        message.worker_id, message.predicted_s, message.missing_tokens, message.delay_s, message.itl_s
    )


def _kind_name(kind: pb.PhaseKind) -> str:
    return pb.PhaseKind.Name(kind).removeprefix("PHASE_KIND_").lower()
