"""Tokens that take the fast path: never two writes at once, in order, and the same answer as by the ordinary way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.fleet.decode_client import OutputStream
from gateway.intake.wanted import IdsPrompt, Wanted
from gateway.request import decode_half
from gateway.request.decode_half import FEW_STREAMS, _add_decode_time
from gateway.request.direct import Direct
from protos.v1 import decode_pb2 as pb
from protos.v1.types_pb2 import Timings
from testing.gateway.parts import Fault, Script, expected_ids
from tests.gateway.conftest import MakeRig, Rig
from tests.gateway.test_requests import PROMPT, until

Item = tuple[int, tuple[int, ...]]
"""A sample's index and tokens."""


class Client:
    """Writes down what it is sent; `slow` writes wait for a future, as a socket that is full does, `instant` ones for
    nothing, as uvicorn's while there is room."""

    def __init__(self, *, slow: bool = False, instant: bool = False) -> None:
        self.slow = slow
        self.instant = instant
        self.got: list[Item] = []
        self.sent_directly = 0
        self.waiting: asyncio.Future[None] | None = None
        self.direct: Direct[Item] = Direct(self._message, self._write)

    def _message(self, index: int, token_ids: Sequence[int], text: str) -> Item | None:
        self.sent_directly += 1
        return index, tuple(token_ids)

    async def _write(self, item: Item) -> None:
        assert self.waiting is None, "two writes at once"
        if self.slow:
            self.waiting = asyncio.get_running_loop().create_future()
            try:
                await self.waiting
            finally:
                self.waiting = None
        if not self.instant:
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
    client.direct.send(0, [7], "a")
    assert not client.direct.ready
    writing = asyncio.create_task(client.direct.write((0, (8,))))
    await asyncio.sleep(0.01)
    assert client.got == []
    client.let_go()
    await until(lambda: client.got == [(0, (7,))] and client.waiting is not None)
    client.let_go()
    await writing
    assert client.got == [(0, (7,)), (0, (8,))] and client.direct.ready


async def test_a_failed_write_is_told_to_the_next_writer() -> None:
    client = Client(slow=True)
    client.direct.send(0, [7], "a")
    settling = asyncio.create_task(client.direct.settle())
    await asyncio.sleep(0)
    client.let_go(ConnectionError("gone"))
    for waits in (settling, client.direct.settle(), client.direct.write((0, (8,)))):
        with pytest.raises(ConnectionError):
            await waits
    assert not client.direct.ready and client.got == []


async def test_before_there_is_a_client_nothing_is_ready_and_nothing_to_say_is_not_written() -> None:
    client = Client()
    late: Direct[Item] = Direct(lambda index, token_ids, text: None)
    assert not late.ready
    late.open(client._write)
    late.send(0, [7], "")
    await late.settle()
    assert late.ready and client.got == []


async def answer(rig: Rig, client: Client, **wanted: Any) -> list[Item]:
    """Everything in the order in which it was written."""
    request = await rig.validator.resolve(
        Wanted(**{"prompt": IdsPrompt(PROMPT), "max_tokens": 12, "temperature": 0.0, **wanted})
    )
    async with aclosing(rig.runner.generate(request, client.direct)) as pieces:
        async for piece in pieces:
            await client.direct.write((piece.index, tuple(piece.token_ids)))
    return client.got


def ids(items: list[Item], sample: int = 0) -> list[int]:
    return [token for index, tokens in items if index == sample for token in tokens]


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

    def fails(index: int, token_ids: Sequence[int], text: str) -> Item:
        raise RuntimeError("a bug")

    client.direct = Direct(fails, client._write)
    wrong, right = await asyncio.gather(answer(rig, client), answer(rig, other), return_exceptions=True)
    assert isinstance(wrong, RuntimeError) and not isinstance(right, BaseException)
    assert ids(right) == expected_ids(PROMPT, 12)


@pytest.mark.parametrize("instant", [False, True])
async def test_with_many_streams_the_tokens_of_several_steps_take_the_short_way_together(
    make_rig: MakeRig, instant: bool
) -> None:
    lengths = [40 + i % 20 for i in range(2 * FEW_STREAMS)]
    rig, clients = await make_rig(Script(step_s=0.002)), [Client(instant=instant) for _ in lengths]
    async with asyncio.timeout(60):
        answers = await asyncio.gather(
            *(answer(rig, client, max_tokens=n, n=1 + n % 2) for client, n in zip(clients, lengths, strict=True))
        )
    for items, n in zip(answers, lengths, strict=True):
        assert [ids(items, i) for i in range(1 + n % 2)] == [expected_ids(PROMPT, n, i) for i in range(1 + n % 2)]
    assert rig.metric("vllm:generation_tokens_total") == sum(n * (1 + n % 2) for n in lengths)
    together = [len(tokens) for items in answers for _, tokens in items]
    assert sum(client.sent_directly for client in clients) > len(together) / 2 and max(together) > 1


async def test_with_many_streams_several_steps_go_out_together_also_by_the_ordinary_way(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_half, "MESSAGE_COST_S", 0.01)
    rig, clients = await make_rig(Script(step_s=0.002)), [Client() for _ in range(2 * FEW_STREAMS)]
    async with asyncio.timeout(60):
        answers = await asyncio.gather(*(answer(rig, each, max_tokens=60, stop=["no such text"]) for each in clients))
    assert all(ids(items) == expected_ids(PROMPT, 60) for items in answers)
    assert not any(client.sent_directly for client in clients)
    assert sum(map(len, answers)) < len(clients) * 60 / 2


@pytest.mark.parametrize(
    ("timings", "told"),
    [
        (Timings(hand_over_ns=3, decode_ns=5), {"hand_over_ns": 3, "decode_ns": 5}),
        (Timings(hand_over_ns=3), {"decode_ns": 2_000_000_000}),
        (None, {"decode_ns": 2_000_000_000}),
    ],
)
def test_decode_time_is_the_workers_account_or_else_the_gateways(
    monkeypatch: pytest.MonkeyPatch, timings: Timings | None, told: dict[str, int]
) -> None:
    took: dict[str, int] = {}
    state: Any = SimpleNamespace(took=took.update)
    monkeypatch.setattr(time, "monotonic", lambda: 12.0)
    _add_decode_time(state, timings, began=10.0)
    assert took == told


class Short:
    """A fast path that takes what it is told to, after a pause."""

    def __init__(self, pause_s: float = 0.0, *takes: bool | Exception) -> None:
        self.pause = pause_s
        self.takes = list(takes)
        self.taken: list[tuple[int, int, tuple[int, ...]]] = []

    def pause_s(self, sample: int) -> float:
        return self.pause

    def take(self, sample: int, first_index: int, token_ids: Sequence[int]) -> bool:
        takes = self.takes.pop(0) if self.takes else True
        if isinstance(takes, Exception):
            raise takes
        if takes:
            self.taken.append((sample, first_index, tuple(token_ids)))
        return takes


async def reading(short: Short) -> tuple[OutputStream, asyncio.Task[list[pb.SequenceOutput]]]:
    """A stream whose reader waits."""
    stream = OutputStream(1, 0, [0, 1])
    stream.short_way = short
    reader = asyncio.create_task(stream.get())
    await asyncio.sleep(0)
    return stream, reader


def put(stream: OutputStream, *tokens: tuple[int, int]) -> None:
    """(sample, output index) of each; the token is ten times the index."""
    for sample, index in tokens:
        stream.put_token(0, sample, index, 10 * index)


def read(outputs: list[pb.SequenceOutput]) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(output.sample_index, output.first_index, tuple(output.token_ids)) for output in outputs]


async def test_tokens_wait_for_their_pause_and_go_out_as_one_message_a_sample() -> None:
    short = Short(0.02)
    stream, reader = await reading(short)
    put(stream, (0, 4), (1, 7), (0, 5), (1, 8), (0, 6))
    assert not short.taken
    await until(lambda: bool(short.taken))
    assert short.taken == [(0, 4, (40, 50, 60)), (1, 7, (70, 80))] and not reader.done()
    put(stream, (0, 7))
    stream.put(pb.SequenceOutput(sample_index=0, first_index=8, token_ids=[80], finish_reason=1))
    assert read(await reader) == [(0, 7, (70,)), (0, 8, (80,))], "the end waits for no pause, and for its turn"
    await asyncio.sleep(0.04)
    assert len(short.taken) == 2


async def test_what_the_short_way_does_not_take_the_reader_gets_with_all_that_follows() -> None:
    stream, reader = await reading(short := Short(0.0, True, False, False))
    put(stream, (0, 4), (0, 5), (1, 9), (0, 6))
    assert read(await reader) == [(0, 5, (50, 60)), (1, 9, (90,))] and short.taken == [(0, 4, (40,))]


async def test_what_came_while_the_reader_was_busy_takes_the_short_way_too() -> None:
    stream = OutputStream(1, 0, [0])
    stream.short_way = short = Short(0.01)
    put(stream, (0, 4), (0, 5))
    reader = asyncio.create_task(stream.get())
    await until(lambda: short.taken == [(0, 4, (40, 50))])
    put(stream, (0, 8))  # a gap is not hidden in a run
    put(stream, (0, 6))
    await until(lambda: len(short.taken) == 3)
    assert short.taken[1:] == [(0, 8, (80,)), (0, 6, (60,))] and not reader.done()
    reader.cancel()


@pytest.mark.parametrize("pause_s", [0.0, 0.01])
async def test_a_short_way_that_fails_ends_the_stream(pause_s: float) -> None:
    stream, reader = await reading(Short(pause_s, RuntimeError("a bug")))
    put(stream, (0, 4))
    with pytest.raises(RuntimeError, match="a bug"):
        await reader


async def test_a_reader_that_goes_takes_the_timer_along() -> None:
    stream, reader = await reading(short := Short(0.01))
    put(stream, (0, 4))
    reader.cancel()
    await asyncio.sleep(0.03)
    assert not short.taken


async def test_an_end_that_comes_when_the_pause_is_over_is_no_plain_token() -> None:
    stream, reader = await reading(short := Short(0.02))
    put(stream, (0, 4))
    end = pb.SequenceOutput(sample_index=0, first_index=5, token_ids=[50], finish_reason=1)

    def late() -> None:  # the timer is due in the very pass of the loop that brings the end
        asyncio.get_running_loop().call_soon(stream.put, end)
        time.sleep(0.05)

    asyncio.get_running_loop().call_soon(late)
    async with asyncio.timeout(5):
        assert read(await reader) == [(0, 4, (40,)), (0, 5, (50,))]
    assert not short.taken
