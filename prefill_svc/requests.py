"""Checks the branches, lengths and token ids of a request message, and converts the message to a job. The gateway
checks most sampling parameters.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from common import convert
from common.errors import InvalidArgument
from common.types import Branch, CacheQuota, SamplingParams, StoppingParams
from prefill_svc.early_tickets import EarlyTickets
from prefill_svc.job import Job
from prefill_svc.pooling import Pool
from protos.v1 import prefill_pb2 as pb
from protos.v1 import types_pb2 as types_pb


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits on the requests that a worker accepts."""

    max_model_len: int
    vocab_size: int
    max_num_seqs: int


def job_of(request: pb.PrefillRequest, limits: RequestLimits) -> Job:
    """Returns a job for the request, with the current time as its arrival time. Raises InvalidArgument, which names the
    field, if a check fails.
    """
    prompt = list(request.prompt_token_ids)
    branches = [convert.branch_from_pb(branch) for branch in request.branches]
    sampling = convert.sampling_from_pb(request.sampling)
    stopping = convert.stopping_from_pb(request.stopping)
    _check_group(branches, sampling, limits)
    _check_lengths(prompt, branches, limits)
    if request.public_tokens > len(prompt):
        raise InvalidArgument.of("public_tokens", f"must be at most the prompt's length, {len(prompt)}")
    _check_ids(prompt, branches, sampling, stopping, limits.vocab_size)
    job = Job.of(prompt, branches, sampling, stopping)
    if request.HasField("early_tickets"):
        asked = request.early_tickets
        if asked.first_token > len(prompt):
            raise InvalidArgument.of("early_tickets.first_token", f"must be at most the prompt's length, {len(prompt)}")
        job.early = EarlyTickets.of(asked.first_token, asked.min_tokens, job.trunk.num_tokens)
    if request.HasField("cache_quota"):
        quota = _quota(request.cache_quota)
        for sequence in job.sequences:
            sequence.quota = quota
    if request.pooling:
        _pool(job, request.pooling)
    job.priority, job.arrived_ns = request.priority, time.monotonic_ns()
    return job


def _pool(job: Job, asked: types_pb.Pooling) -> None:
    """Makes a job compute an embedding instead of drawing tokens."""
    pooling = next((name for name, value in convert.POOLINGS.items() if value == asked), None)
    if pooling is None:
        raise InvalidArgument.of("pooling", f"must be one of Pooling's values, got {asked}")
    if len(job.branches) > 1 or job.trunk.output_ids or job.is_beam_search:
        raise InvalidArgument.of("branches", "must be a single branch without output tokens for an embedding")
    job.trunk.pooling, job.pool = pooling, Pool(pooling)


def _quota(message: types_pb.CacheQuota) -> CacheQuota:
    try:
        return convert.quota_from_pb(message)
    except ValueError as error:
        raise InvalidArgument.of("cache_quota", str(error)) from None


def _check_group(branches: Seq[Branch], sampling: SamplingParams, limits: RequestLimits) -> None:
    """Raises InvalidArgument unless the number of sequences and the sample indices of the branches are valid, and a
    beam search has a single empty branch and no grammar.
    """
    if not branches:
        raise InvalidArgument.of("branches", "must hold at least one branch")
    if sampling.width > limits.max_num_seqs:
        field = "num_sequences" if sampling.beam_width is None else "beam_width"
        raise InvalidArgument.of(field, f"must be at most {limits.max_num_seqs}, the number of sequences in a batch")
    if sampling.width < sampling.num_sequences or sampling.num_sequences < 1:
        raise InvalidArgument.of("num_sequences", "must be at least 1, and at most beam_width")
    if sampling.beam_width is not None and (len(branches) > 1 or branches[0].output_ids or branches[0].sample_index):
        raise InvalidArgument.of(
            "branches", "must be a single branch without output tokens, with sample_index 0, for a beam search"
        )
    if sampling.beam_width is not None and sampling.structured is not None:
        raise InvalidArgument.of("structured_output", "may not be given with a beam search")
    indices = {branch.sample_index for branch in branches}
    if len(indices) < len(branches):
        raise InvalidArgument.of("branches", "must each have a different sample_index")
    if max(indices) >= sampling.num_sequences:
        limit = sampling.num_sequences
        raise InvalidArgument.of("branches", f"must have a sample_index below num_sequences, which is {limit}")


def _check_lengths(prompt: Seq[int], branches: Seq[Branch], limits: RequestLimits) -> None:
    if not prompt:
        raise InvalidArgument.of("prompt_token_ids", "must hold at least one token")
    if len(prompt) + max(len(branch.output_ids) for branch in branches) >= limits.max_model_len:
        raise InvalidArgument.of("prompt_token_ids", f"must be shorter than {limits.max_model_len} tokens")


def _check_ids(
    prompt: Seq[int], branches: Seq[Branch], sampling: SamplingParams, stopping: StoppingParams, vocab_size: int
) -> None:
    outputs = [max(branch.output_ids) for branch in branches if branch.output_ids]
    if max(*prompt, *outputs, *sampling.named_ids, *stopping.stop_token_ids, 0) >= vocab_size:
        raise InvalidArgument.of("token ids", f"must be below the vocabulary size {vocab_size}")
    if not all(sampling.bad_token_ids) or sampling.allowed_token_ids == ():
        raise InvalidArgument.of("sampling", "must not have empty bad_token_ids or allowed_token_ids")
    if max(sampling.logprobs or 0, sampling.prompt_logprobs or 0) > vocab_size:
        raise InvalidArgument.of("logprobs", f"must be at most the vocabulary size {vocab_size}")
