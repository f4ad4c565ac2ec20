"""Direct calls to workers: invalid calls, which our gateway never makes, affect only the request, never the worker."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any, cast

import grpc
import pytest

from looseleaf import LLM
from protos.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from protos.v1 import types_pb2 as pb
from testing.system import assert_nothing_held, trust_at

GREEDY = pb.SamplingParams(temperature=0.0)
STOPPING = pb.StoppingParams(max_tokens=8)
PROMPT = list(range(20, 60))


def prefill(llm: LLM, **changes: Any) -> prefill_pb2.PrefillDone:
    return responses(llm, **changes)[-1].done


def responses(llm: LLM, **changes: Any) -> list[prefill_pb2.PrefillResponse]:
    request = prefill_pb2.PrefillRequest(
        request_id="direct", prompt_token_ids=PROMPT, branches=[pb.Branch()], sampling=GREEDY, stopping=STOPPING
    )
    request.MergeFrom(prefill_pb2.PrefillRequest(**changes))
    with grpc.insecure_channel(llm.addresses.services["prefill"]) as channel:
        stub = cast(Any, prefill_pb2_grpc.PrefillServiceStub)(channel)
        return list(stub.Prefill(request, timeout=120, metadata=trust_at(llm.addresses.block_store).metadata))


def decode(llm: LLM, submit: decode_pb2.Submit) -> Iterator[decode_pb2.SequenceOutput]:
    """Returns all outputs of one submitted group."""
    with grpc.insecure_channel(llm.addresses.services["decode"]) as channel:
        stub = cast(Any, decode_pb2_grpc.DecodeServiceStub)(channel)
        commands: queue.SimpleQueue[decode_pb2.SessionRequest | None] = queue.SimpleQueue()
        commands.put(decode_pb2.SessionRequest(submit=submit))
        shown = trust_at(llm.addresses.block_store).metadata
        for response in stub.Session(iter(commands.get, None), timeout=120, metadata=shown):
            plain = response.plain_tokens
            for index, token_id in zip(plain.output_indices, plain.token_ids, strict=True):
                yield decode_pb2.SequenceOutput(first_index=index, token_ids=[token_id])
            yield from response.outputs
            if any(output.rejection or output.finish_reason for output in response.outputs):
                commands.put(None)  # half-closes the session, which ends it


def submit_of(done: prefill_pb2.PrefillDone, outputs: list[int]) -> decode_pb2.Submit:
    return decode_pb2.Submit(
        handle=1,
        request_id="direct",
        ticket=done.ticket,
        prompt_token_ids=PROMPT,
        branches=[pb.Branch(output_token_ids=outputs)],
        sampling=GREEDY,
        stopping=STOPPING,
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"branches": [pb.Branch(output_token_ids=[1 << 20])]},
        {"stopping": pb.StoppingParams(stop_token_ids=[1 << 20])},
        {"sampling": pb.SamplingParams(logit_bias={1 << 20: 1.0})},
        {"sampling": pb.SamplingParams(logprobs=1 << 20)},
        {"prompt_token_ids": [1 << 20]},
    ],
    ids=str,
)
def test_prefill_refuses_ids_outside_the_vocabulary(llm: LLM, changes: dict[str, Any]) -> None:
    pid = llm.pids["prefill"]
    with pytest.raises(grpc.RpcError) as refusal:
        prefill(llm, **changes)
    assert refusal.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)
    assert prefill(llm).ticket.branches[0].num_tokens == len(PROMPT)
    assert llm.pids["prefill"] == pid


def test_the_load_in_the_first_response_includes_the_request(llm: LLM) -> None:
    assert_nothing_held(llm.addresses.block_store)
    first, *_ = responses(llm, branches=[pb.Branch(sample_index=1)], sampling=pb.SamplingParams(num_sequences=2))
    assert first.queued.load.num_waiting == 2, "samples"
    assert len(PROMPT) <= first.queued.load.waiting_tokens <= 2 * len(PROMPT)


def test_decode_rejects_a_ticket_that_does_not_fit_and_lets_its_blocks_go(llm: LLM) -> None:
    pid = llm.pids["decode"]
    assert_nothing_held(llm.addresses.block_store)
    done = prefill(llm)
    [output] = decode(llm, submit_of(done, [done.tokens[0].token_id, 7, 7]))
    assert output.rejection == decode_pb2.REJECTION_INTERNAL
    assert_nothing_held(llm.addresses.block_store, within_s=6.5)  # a ticket's lease is 8 s

    done = prefill(llm)
    *_, last = decode(llm, submit_of(done, [done.tokens[0].token_id]))
    assert last.finish_reason == pb.FINISH_REASON_LENGTH
    [again] = decode(llm, submit_of(done, [done.tokens[0].token_id]))
    assert again.rejection == decode_pb2.REJECTION_LOST, "a ticket is claimed once"
    assert llm.pids["decode"] == pid
