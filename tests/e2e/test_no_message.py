"""Bytes that are not a valid message, sent to every method of every service: INVALID_ARGUMENT, never UNKNOWN or
INTERNAL."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import grpc
import pytest
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from looseleaf import LLM
from protos.v1 import block_store_pb2, decode_pb2, inference_pb2, prefill_pb2
from testing.system import assert_nothing_held, trust_at

SERVED: dict[str, FileDescriptor] = {
    "gateway": inference_pb2.DESCRIPTOR,
    "block_store": block_store_pb2.DESCRIPTOR,
    "prefill": prefill_pb2.DESCRIPTOR,
    "decode": decode_pb2.DESCRIPTOR,
}
ROUNDS = 20
Metadata = tuple[tuple[str, str], ...]


def methods(service: str) -> Iterator[str]:
    for file in (SERVED[service], health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
        for name, found in file.services_by_name.items():
            yield from (f"/{file.package}.{name}/{method.name}" for method in found.methods)


def outcome(
    channel: grpc.Channel, method: str, messages: list[bytes], shown: Metadata, within_s: float
) -> grpc.StatusCode:
    try:
        for _ in channel.stream_stream(method)(iter(messages), timeout=within_s, metadata=shown):
            pass
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("service", SERVED)
def test_no_message(llm: LLM, service: str) -> None:
    draw, found = random.Random(service), Counter[grpc.StatusCode]()
    shown = trust_at(llm.addresses.block_store).metadata
    with grpc.insecure_channel(llm.addresses.services[service]) as channel:
        for method in methods(service):
            for _ in range(ROUNDS):
                garbage = b"\x0f" + draw.randbytes(draw.randrange(40))  # no field has this wire type
                found[outcome(channel, method, [garbage], shown, 60.0)] += 1
                assert set(found) == {grpc.StatusCode.INVALID_ARGUMENT}, method


@pytest.mark.parametrize("service", SERVED)
def test_anything_at_all(llm: LLM, service: str) -> None:
    draw = random.Random(service)
    allowed = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "ABORTED", "DEADLINE_EXCEEDED", "UNIMPLEMENTED"}
    shown = trust_at(llm.addresses.block_store).metadata
    with grpc.insecure_channel(llm.addresses.services[service]) as channel:
        for method in methods(service):
            if method.endswith("Watch"):
                continue  # this method answers until the caller stops
            for _ in range(ROUNDS):
                messages = [draw.randbytes(draw.randrange(60)) for _ in range(draw.randrange(1, 4))]
                assert outcome(channel, method, messages, shown, 3.0).name in allowed, (method, messages)


def test_nothing_is_held_and_answers_come(llm: LLM) -> None:
    assert llm.client.generate("the mill", max_tokens=4).text is not None
    assert_nothing_held(llm.addresses.block_store)
