"""Requests that a prefill worker rejects."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import InvalidArgument
from common.types import CacheQuota
from prefill_svc.requests import RequestLimits, job_of
from protos.v1 import prefill_pb2
from protos.v1 import types_pb2 as pb

LIMITS = RequestLimits(max_model_len=64, vocab_size=100, max_num_seqs=4)
BRANCH = pb.Branch


def request(**changes: Any) -> prefill_pb2.PrefillRequest:
    given: dict[str, Any] = {"prompt_token_ids": [5, 6, 7], "branches": [BRANCH()], "stopping": pb.StoppingParams()}
    return prefill_pb2.PrefillRequest(**(given | changes))


def test_a_group_becomes_one_job() -> None:
    branches = [BRANCH(sample_index=i, output_token_ids=[9] * (i == 2)) for i in (0, 2, 3)]
    job = job_of(request(branches=branches, sampling=pb.SamplingParams(num_sequences=4), priority=-3), LIMITS)
    assert [(s.prompt_ids, s.output_ids) for s in job.sequences] == [([5, 6, 7], []), ([5, 6, 7], [9])]
    assert job.branches == [(0, 0), (1, 2), (0, 3)] and job.priority == -3 and job.arrived_ns
    assert [s.quota for s in job.sequences] == [None, None]


def test_every_sequence_has_the_tenants_quota() -> None:
    branches = [BRANCH(sample_index=i, output_token_ids=[9] * i) for i in (0, 1)]
    quota, sampling = pb.CacheQuota(owner=b"t" * 32, percent=100), pb.SamplingParams(num_sequences=2)
    job = job_of(request(branches=branches, sampling=sampling, cache_quota=quota), LIMITS)
    assert [s.quota for s in job.sequences] == [CacheQuota(b"t" * 32, 100)] * 2


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"branches": []}, "branches"),
        ({"branches": [BRANCH(), BRANCH(sample_index=1)]}, "branches"),  # two branches of one sample
        ({"branches": [BRANCH(), BRANCH()], "sampling": pb.SamplingParams(num_sequences=2)}, "branches"),
        ({"sampling": pb.SamplingParams(num_sequences=5)}, "num_sequences"),
        ({"sampling": pb.SamplingParams(num_sequences=0)}, "num_sequences"),
        ({"sampling": pb.SamplingParams(beam_width=5)}, "beam_width"),
        ({"sampling": pb.SamplingParams(beam_width=2, num_sequences=3)}, "num_sequences"),
        ({"branches": [BRANCH(output_token_ids=[1])], "sampling": pb.SamplingParams(beam_width=2)}, "branches"),
        (
            {
                "branches": [BRANCH(), BRANCH(sample_index=1)],
                "sampling": pb.SamplingParams(beam_width=2, num_sequences=2),
            },
            "branches",
        ),
        (
            {"sampling": pb.SamplingParams(beam_width=2, structured_output=pb.StructuredOutput(regex="a"))},
            "structured_output",
        ),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"branches": [BRANCH(output_token_ids=[1] * 61)]}, "prompt_token_ids"),
        ({"branches": [BRANCH(output_token_ids=[100])]}, "token ids"),
        ({"sampling": pb.SamplingParams(logit_bias={100: 1.0})}, "token ids"),
        ({"sampling": pb.SamplingParams(logprobs=101)}, "logprobs"),
        ({"cache_quota": pb.CacheQuota(owner=b"t" * 31, percent=5)}, "cache_quota"),
        ({"cache_quota": pb.CacheQuota(owner=b"t" * 32, percent=101)}, "cache_quota"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_by_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        job_of(request(**changes), LIMITS)
    assert [violation.field for violation in refusal.value.violations] == [field]
