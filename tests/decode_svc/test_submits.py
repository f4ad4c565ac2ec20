"""Invalid submits, which our gateway never sends, are refused before they affect a step."""

from __future__ import annotations

from typing import Any

import pytest

from common.types import CacheQuota
from decode_svc.submits import read_submit
from protos.v1 import decode_pb2, types_pb2

TICKET = types_pb2.Ticket(branches=[types_pb2.BranchTables(num_tokens=3)] * 2)
ONE = types_pb2.Ticket(branches=[types_pb2.BranchTables(num_tokens=3)])
TWO = [types_pb2.Branch(sample_index=i, output_token_ids=[7]) for i in (0, 1)]
BEAMS = {
    "ticket": ONE,
    "branches": [types_pb2.Branch()],
    "sampling": types_pb2.SamplingParams(num_sequences=2, beam_width=2),
    "beam_candidates": types_pb2.BeamCandidates(token_ids=[5, 6, 7, 8], logprobs=[-1.0, -2.0, -3.0, -4.0]),
}


def ticket_with(num_groups: int, shared_blocks: int) -> types_pb2.Ticket:
    """Returns a ticket whose first branch has one block in one KV group, and whose second branch is as given."""
    first = types_pb2.BranchTables(groups=[types_pb2.BlockTable(blocks=[4], generations=[1])], num_tokens=3)
    other = types_pb2.BranchTables(groups=[types_pb2.BlockTable()] * num_groups, shared_blocks=shared_blocks)
    return types_pb2.Ticket(branches=[first, other])


def submit(**changes: Any) -> decode_pb2.Submit:
    fields: dict[str, Any] = {
        "handle": 1,
        "prompt_token_ids": [5, 6, 7],
        "ticket": TICKET,
        "branches": TWO,
        "sampling": types_pb2.SamplingParams(num_sequences=2),
    }
    return decode_pb2.Submit(**(fields | changes))


def test_good_ones_are_read() -> None:
    quota = types_pb2.CacheQuota(owner=b"t" * 32, percent=0)
    with_quota = read_submit(submit(cache_quota=quota), 512)
    assert [s.quota for s in with_quota.group.sequences] == [CacheQuota(b"t" * 32, 0)] * 2
    samples, beams = read_submit(submit(), 512), read_submit(submit(**BEAMS), 512)
    assert [(s.sample_index, s.quota) for s in samples.group.sequences] == [
        (0, None),
        (1, None),
    ] and samples.candidates is None
    assert beams.candidates is not None and beams.candidates.token_ids == (5, 6, 7, 8)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"prompt_token_ids": []}, "prompt_token_ids must hold"),
        ({"branches": [], "ticket": types_pb2.Ticket()}, "branches must hold at least one"),
        ({"ticket": ONE}, "branches must have 1 entries, as ticket.branches has, got 2"),
        ({"branches": [TWO[0], TWO[0]]}, "occurs twice"),
        ({"sampling": types_pb2.SamplingParams(num_sequences=1)}, "sample_index 1 is not below num_sequences, 1"),
        ({"branches": [TWO[0], types_pb2.Branch(sample_index=9)]}, "sample_index 9 is not below num_sequences, 2"),
        ({"ticket": ticket_with(1, 2)}, "branch shares more blocks than its first branch has"),
        ({"ticket": ticket_with(2, 1)}, "branch has 2 KV groups, but its first branch has 1"),
        ({"prompt_token_ids": [5, 512]}, "token id 512 is not below the vocabulary size 512"),
        ({"branches": [TWO[0], types_pb2.Branch(sample_index=1, output_token_ids=[600])]}, "token id 600"),
        ({"sampling": types_pb2.SamplingParams(num_sequences=2, logprobs=513)}, "logprobs must be at most"),
        ({"cache_quota": types_pb2.CacheQuota(owner=b"t", percent=5)}, "cache_quota must have an owner"),
        ({"cache_quota": types_pb2.CacheQuota(owner=b"t" * 32, percent=101)}, "a percent of at most 100"),
        (BEAMS | {"beam_candidates": types_pb2.BeamCandidates()}, "candidates with a log-probability each"),
        (BEAMS | {"branches": TWO, "ticket": TICKET}, "has one branch"),
        (BEAMS | {"sampling": types_pb2.SamplingParams(num_sequences=3, beam_width=2)}, "returns at most as many"),
        (BEAMS | {"sampling": types_pb2.SamplingParams(num_sequences=5, beam_width=5)}, "beam_width candidates"),
        (
            BEAMS | {"sampling": types_pb2.SamplingParams(num_sequences=2, beam_width=2, length_penalty=400)},
            "length_penalty must be at most 10",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_ones_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_submit(submit(**changes), 512)
