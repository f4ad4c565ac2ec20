"""The gRPC service of a prefill worker: a prompt that cannot be queued."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from common.errors import Internal
from prefill_svc.requests import RequestLimits
from prefill_svc.service import PrefillServicer
from protos.v1 import prefill_pb2 as pb
from protos.v1 import types_pb2
from worker.adapters import pool_of
from worker.grammars import Grammars
from worker.step_thread import StepThread

Make = Callable[..., Any]


class BrokenDisk:
    async def restore(self, sequence: object) -> None:
        raise RuntimeError("on purpose")


async def answers(servicer: PrefillServicer) -> list[pb.PrefillResponse]:
    request = pb.PrefillRequest(
        prompt_token_ids=range(10, 47),
        branches=[types_pb2.Branch()],
        sampling=types_pb2.SamplingParams(temperature=0.0, num_sequences=1),
        stopping=types_pb2.StoppingParams(max_tokens=4),
    )
    return [response async for response in servicer.Prefill(request, None)]  # type: ignore[arg-type]


def test_an_unexpected_error_of_the_disk_tier_ends_the_call(make_world: Make) -> None:
    world = make_world()
    thread = StepThread(world.worker.step)
    limits = RequestLimits(world.runner.max_model_len, world.runner.config.vocab_size, 4)
    shared = Grammars("unused", world.runner.config.vocab_size), pool_of(world.runner)
    servicer = PrefillServicer(world.worker, thread, limits, shared, BrokenDisk())  # type: ignore[arg-type]
    with pytest.raises(Internal, match="could not be queued"):
        asyncio.run(asyncio.wait_for(answers(servicer), 60))
    assert servicer.num_calls == 0
