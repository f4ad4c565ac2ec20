"""Helpers for tests of a running system: seeded prompts, checks of held blocks and of health, and waiting."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from block_store import operator_file
from common.rpc import open_blocking_channel, open_channel
from common.trust import NO_TRUST, Trust
from protos.v1 import block_store_pb2 as pb
from protos.v1 import block_store_pb2_grpc

T = TypeVar("T")


def prompts(num_prompts: int, *, seed: int, lengths: tuple[int, int], vocab_size: int = 256) -> list[list[int]]:
    """Returns prompts of random token ids. `lengths` are the minimum and maximum lengths. The ids are from 10 to
    vocab_size - 1.
    """
    rng = random.Random(seed)
    return [[rng.randrange(10, vocab_size) for _ in range(rng.randint(*lengths))] for _ in range(num_prompts)]


def trust_at(block_store: str) -> Trust:
    """Returns the credentials of the deployment to which the store at this address belongs, or NO_TRUST if its
    operator file is not found.
    """
    found = operator_file.find(block_store)
    return NO_TRUST if found is None else found.trust.read()


def inspect(block_store: str, *, include_blocks: bool = False) -> pb.InspectResponse:
    """Returns the state of the block store's arena: counts, holders and, with `include_blocks`, every block."""
    trust = trust_at(block_store)
    with open_blocking_channel(block_store, trust) as channel:
        stub = cast(Any, block_store_pb2_grpc.BlockStoreServiceStub)(channel)
        request = pb.InspectRequest(include_blocks=include_blocks)
        return cast(pb.InspectResponse, stub.Inspect(request, timeout=60, metadata=trust.metadata))


def assert_nothing_held(block_store: str, *, within_s: float = 60.0) -> pb.InspectResponse:
    """Waits until every block is FREE, CACHED or RESERVED and no holder has a sealed block. Returns the state. Raises
    AssertionError after `within_s`. The blocks of a cancelled request may be held until the lease of a ticket has
    ended.
    """

    def look() -> pb.InspectResponse | str:
        try:
            return inspect(block_store)
        except grpc.RpcError as error:  # its Redis did not answer the store in time
            return str(error)

    def is_idle(state: pb.InspectResponse | str) -> bool:
        return not isinstance(state, str) and state.sealed == 0 and state.quarantine == 0

    state = wait_for(look, is_idle, within_s, "blocks stay held")
    assert not isinstance(state, str)
    assert state.free + state.cached + state.reserved == state.num_blocks, state
    held = sum(holder.num_references for holder in state.holders)
    assert held == state.reserved, f"{held} references, {state.reserved} reserved blocks"
    return state


def wait_for(look: Callable[[], T], good: Callable[[T], bool], within_s: float, otherwise: str) -> T:
    """Returns the first value of `look` that is `good`. Raises AssertionError with the last value after `within_s`."""
    deadline = time.monotonic() + within_s
    while not good(value := look()):
        assert time.monotonic() < deadline, f"{otherwise}: {value}"
        time.sleep(0.05)
    return value


async def check_health(address: str, *, service: str = "", timeout_s: float = 2.0) -> bool:
    """Returns whether the health service at `address` reports SERVING within `timeout_s`."""
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            reply = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.aio.AioRpcError:
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
