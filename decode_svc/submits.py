"""Reads a submit message from a gateway: the group, its ticket, and a beam search's first candidates.

Token ids and the values of a beam search are checked here, because a bad value could make a whole step fail.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from common import convert
from common.ticket import Ticket
from common.tracing import TraceContext
from common.types import CacheQuota, SamplingParams, StoppingParams
from decode_svc.scheduler import Group
from engine.beam_search import Candidates
from engine.sequence import Sequence
from protos.v1 import decode_pb2 as pb


class Submission(NamedTuple):
    """A group that a gateway has submitted."""

    group: Group
    ticket: Ticket
    cache_salt: bytes
    candidates: Candidates | None
    """The candidates of a beam search, or None for samples."""
    public_tokens: int = 0


MAX_LENGTH_PENALTY = 10.0
"""Maximum magnitude of `length_penalty`, an exponent. A power too large for floating point would make a whole step
fail.
"""


def read_submit(submit: pb.Submit, vocab_size: int) -> Submission:
    """Returns the submission in a message. Raises ValueError if the branches, the ticket, the token ids, the quota or a
    beam search's candidates fail a check, and InvalidArgument if a block table of the ticket is invalid.
    """
    sampling = convert.sampling_from_pb(submit.sampling)
    stopping = convert.stopping_from_pb(submit.stopping)
    ticket = convert.ticket_from_pb(submit.ticket)
    candidates = None
    if sampling.beam_width is not None:
        candidates = Candidates(tuple(submit.beam_candidates.token_ids), tuple(submit.beam_candidates.logprobs))
    _check_branches(submit, sampling, candidates)
    _check_ids(submit, sampling, stopping, vocab_size)
    quota = _quota(submit)
    prompt, now = list(submit.prompt_token_ids), time.monotonic_ns()
    sequences = [
        Sequence(prompt, list(branch.output_token_ids), sampling, stopping, branch.sample_index, quota=quota)
        for branch in submit.branches
    ]
    deadline = now + submit.timeout_ms * 1_000_000 if submit.HasField("timeout_ms") else None
    group = Group(
        submit.handle,
        submit.attempt,
        sequences,
        priority=submit.priority,
        deadline_ns=deadline,
        arrived_ns=now,
        trace=TraceContext.of(submit.traceparent, submit.tracestate),
    )
    return Submission(group, ticket, submit.cache_salt, candidates, submit.public_tokens)


def _quota(submit: pb.Submit) -> CacheQuota | None:
    try:
        return convert.quota_from_pb(submit.cache_quota) if submit.HasField("cache_quota") else None
    except ValueError as error:
        raise ValueError(f"cache_quota {error}") from None


def _check_branches(submit: pb.Submit, sampling: SamplingParams, candidates: Candidates | None) -> None:
    samples = {branch.sample_index for branch in submit.branches}
    if not submit.prompt_token_ids:
        raise ValueError("prompt_token_ids must hold at least one token")
    if submit.public_tokens > len(submit.prompt_token_ids):
        raise ValueError("public_tokens must be at most the prompt's length")
    if not submit.branches:
        raise ValueError("branches must hold at least one branch")
    if (given := len(submit.branches)) != (in_ticket := len(submit.ticket.branches)):
        raise ValueError(f"branches must have {in_ticket} entries, as ticket.branches has, got {given}")
    if len(samples) != len(submit.branches):
        raise ValueError("branches: a sample_index occurs twice")
    if candidates is None:
        if (largest := max(samples)) >= sampling.num_sequences:
            raise ValueError(f"branches: sample_index {largest} is not below num_sequences, {sampling.num_sequences}")
    elif len(samples) != 1 or not 0 < len(candidates.token_ids) == len(candidates.logprobs):
        raise ValueError("a beam search has one branch, and candidates with a log-probability each")
    elif sampling.structured is not None:
        raise ValueError("a beam search has no structured_output")
    elif not abs(sampling.length_penalty) <= MAX_LENGTH_PENALTY:
        raise ValueError(f"length_penalty must be at most {MAX_LENGTH_PENALTY} and at least the negative of that")
    elif not 0 < sampling.num_sequences <= sampling.width <= len(candidates.token_ids):
        raise ValueError("a beam search has beam_width candidates or more, and returns at most as many")


def _check_ids(submit: pb.Submit, sampling: SamplingParams, stopping: StoppingParams, vocab_size: int) -> None:
    """Raises ValueError if an id is outside the vocabulary, or if `logprobs` exceeds the size of the vocabulary. Such a
    value could make every group of a step fail.
    """
    known = [submit.prompt_token_ids, submit.beam_candidates.token_ids, stopping.stop_token_ids]
    known += [branch.output_token_ids for branch in submit.branches]
    largest = max([max(ids, default=0) for ids in known] + list(sampling.named_ids))
    if largest >= vocab_size:
        raise ValueError(f"token id {largest} is not below the vocabulary size {vocab_size}")
    if (sampling.logprobs or 0) > vocab_size:
        raise ValueError(f"logprobs must be at most the vocabulary size {vocab_size}")
