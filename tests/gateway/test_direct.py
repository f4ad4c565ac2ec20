"""Tokens that take the short way: never two writes at once, in order, and the same answer as by the ordinary way."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from gateway.direct import Direct
from gateway.testing import Fault, Script, expected_ids
from gateway.validate import IdsPrompt, Wanted
from protos.v1 import decode_pb2 as pb
from tests.gateway.conftest import MakeRig, Rig
from tests.gateway.test_requests import PROMPT, until

Item = tuple[int, ...]


class Client:
    """Writes down what it is sent; `slow` writes wait for a future, as a socket that is full does."""

    def __init__(self, *, slow: bool = False) -> None:
        self.slow = slow
        self.got: list[Item] = []
        self.sent_directly = 0
        self.waiting: asyncio.Future[None] | None = None
        self.direct: Direct[Item] = Direct(self._message, self._write)

    def _message(self, index: int, token_id: int, text: str) -> Item | None:
        self.sent_directly += 1
        return (index, token_id)

    async def _write(self, item: Item) -> None:
        assert self.waiting is None, "two writes at once"
        if self.slow:
            self.waiting = asyncio.get_running_loop().create_future()
            try:
                await self.waiting
            finally:
                self.waiting = None
        await asyncio.sleep(0)
        self.got.append(item)

    def let_go(self, error: Exception | None = None) -> None:
        assert self.waiting is not None
        if error is None:
            self.waiting.set_result(None)
        else:
            self.waiting.set_exception(error)


async def test_writes_wait_for_what_was_sent_before() -> None:
    client = Client(slow=True)
    assert client.direct.ready
    client.direct.send(0, 7, "a")
    assert not client.direct.ready
    writing = asyncio.create_task(client.direct.write((0, 8)))
    await asyncio.sleep(0.01)
    assert client.got == []
    client.let_go()
    await until(lambda: client.got == [(0, 7)] and client.waiting is not None)
    client.let_go()
    await writing
    assert client.got == [(0, 7), (0, 8)] and client.direct.ready


async def test_a_failed_write_is_told_to_whoever_writes_next() -> None:
    client = Client(slow=True)
    client.direct.send(0, 7, "a")
    settling = asyncio.create_task(client.direct.settle())
    await asyncio.sleep(0)
    client.let_go(ConnectionError("gone"))
    for waits in (settling, client.direct.settle(), client.direct.write((0, 8))):
        with pytest.raises(ConnectionError):
            await waits
    assert not client.direct.ready and client.got == []


async def test_before_there_is_a_client_nothing_is_ready_and_nothing_to_say_is_not_written() -> None:
    client = Client()
    late: Direct[Item] = Direct(lambda index, token_id, text: None)
    assert not late.ready
    late.open(client._write)
    late.send(0, 7, "")
    await late.settle()
    assert late.ready and client.got == []


async def answer(rig: Rig, client: Client, **wanted: Any) -> list[Item]:
    """(sample, token) of everything in the order in which it was written."""
    request = await rig.validator.resolve(
        Wanted(**{"prompt": IdsPrompt(PROMPT), "max_tokens": 12, "temperature": 0.0, **wanted})
    )
    async with aclosing(rig.runner.generate(request, client.direct)) as pieces:
        async for piece in pieces:
            for token in piece.token_ids:
                await client.direct.write((piece.index, token))
    return client.got


def ids(items: list[Item], sample: int = 0) -> list[int]:
    return [token for index, token in items if index == sample]


async def test_most_tokens_take_the_short_way_and_all_are_counted(make_rig: MakeRig) -> None:
    rig, client = await make_rig(Script(step_s=0.01)), Client()
    assert ids(await answer(rig, client)) == expected_ids(PROMPT, 12)
    assert 1 <= client.sent_directly <= 10  # never the first token, which prefill drew, nor the last
    assert rig.metric("vllm:generation_tokens_total") == 12
    assert rig.metric("vllm:inter_token_latency_seconds_count") == 11


async def test_samples_of_a_group_keep_apart(make_rig: MakeRig) -> None:
    rig, client = await make_rig(Script(step_s=0.01)), Client()
    items = await answer(rig, client, n=3)
    assert [ids(items, sample) for sample in range(3)] == [expected_ids(PROMPT, 12, sample) for sample in range(3)]
    assert client.sent_directly


@pytest.mark.parametrize("wanted", [{"logprobs": 1}, {"stop": ["no such text"]}])
async def test_where_there_is_more_to_say_or_decide_nothing_takes_it(make_rig: MakeRig, wanted: Any) -> None:
    rig, client = await make_rig(Script(step_s=0.01)), Client()
    assert ids(await answer(rig, client, **wanted)) == expected_ids(PROMPT, 12) and not client.sent_directly


async def test_tokens_that_come_while_a_write_waits_follow_it_in_order(make_rig: MakeRig) -> None:
    rig, client = await make_rig(Script(step_s=0.002)), Client(slow=True)
    task = asyncio.create_task(answer(rig, client, max_tokens=40))
    while not task.done():
        await asyncio.sleep(0.011)
        if client.waiting is not None and not client.waiting.done():
            client.let_go()
    assert ids(await task) == expected_ids(PROMPT, 40)


@pytest.mark.parametrize(
    "fault", [Fault("reject", 4, pb.REJECTION_GIVEN_BACK), Fault("die", 4), Fault("repeat", 4), Fault("gap", 4)]
)
async def test_what_went_the_short_way_is_not_produced_again(make_rig: MakeRig, fault: Fault) -> None:
    rig, client = await make_rig(Script(submits=[fault], step_s=0.01)), Client()
    assert ids(await answer(rig, client)) == expected_ids(PROMPT, 12) and client.sent_directly


async def test_a_failure_on_the_short_way_ends_the_request_not_the_session(make_rig: MakeRig) -> None:
    rig, client, other = await make_rig(Script(step_s=0.01)), Client(), Client()

    def fails(index: int, token_id: int, text: str) -> Item:
        raise RuntimeError("a bug")

    client.direct = Direct(fails, client._write)
    wrong, right = await asyncio.gather(answer(rig, client), answer(rig, other), return_exceptions=True)
    assert isinstance(wrong, RuntimeError) and not isinstance(right, BaseException)
    assert ids(right) == expected_ids(PROMPT, 12)
