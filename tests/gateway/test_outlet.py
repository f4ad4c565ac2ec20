"""The outlet of a request: never two writes at once, in order, and no lost tokens, for any behaviour of the client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from common.errors import Unavailable
from common.types import FinishReason
from gateway.fleet.decode_client import DecodeSession, SubmittedGroup
from gateway.fleet.liveness import LivenessLimits
from gateway.fleet.worker_lost import WorkerLost
from gateway.intake.wanted import IdsPrompt, Wanted
from gateway.request import outlet as outlet_module
from gateway.request import request_runner as runner_module
from gateway.request.delta import Delta
from gateway.request.outlet import FEW_STREAMS, Outlet
from protos.v1 import decode_pb2 as pb
from protos.v1.types_pb2 import Timings, WorkerLoad
from testing.gateway.parts import Fault, Script, expected_ids, make_record
from testing.virtual_time import in_virtual_time
from tests.gateway.conftest import MakeRig, Rig
from tests.gateway.test_requests import PROMPT, until

Item = tuple[int, tuple[int, ...]]
"""A sample's index and tokens."""


class Client:
    """A client that records what it receives. By default, a write yields once, like a write to a busy socket. A `slow`
    write waits for a future, like a write to a full socket. An `instant` write does not wait, like a write to uvicorn
    while its buffer has room.
    """

    def __init__(self, *, slow: bool = False, instant: bool = False) -> None:
        self.slow = slow
        self.instant = instant
        self.got: list[Item] = []
        self.deltas: list[Delta] = []
        self.messages = 0
        self.waiting: asyncio.Future[None] | None = None
        self._writing = False

    async def write(self, deltas: list[Delta]) -> None:
        assert not self._writing, "two writes at once"
        self._writing = True
        try:
            if self.slow:
                self.waiting = asyncio.get_running_loop().create_future()
                await self.waiting
            elif not self.instant:
                await asyncio.sleep(0)
        finally:
            self._writing, self.waiting = False, None
        self.messages += 1
        self.deltas += deltas
        self.got += [(delta.index, tuple(delta.token_ids)) for delta in deltas]

    def let_go(self, error: Exception | None = None) -> None:
        assert self.waiting is not None
        if error is None:
            self.waiting.set_result(None)
        else:
            self.waiting.set_exception(error)


def delta_of(outlet: Outlet, sample: int) -> Delta:
    """Returns the pending delta of a sample."""
    for delta in outlet.pending:
        if delta.index == sample:
            return delta
    outlet.pending.append(Delta(sample))
    return outlet.pending[-1]


def add(outlet: Outlet, sample: int, *token_ids: int) -> None:
    delta = delta_of(outlet, sample)
    delta.token_ids += token_ids
    delta.text += "".join(f"<{token}>" for token in token_ids)


@in_virtual_time
async def test_what_comes_while_a_write_is_under_way_follows_it_merged() -> None:
    client = Client(slow=True)
    async with Outlet(client.write) as outlet:
        add(outlet, 0, 7)
        outlet.flush()
        for token in (8, 9):
            add(outlet, 0, token)
            add(outlet, 1, token + 10)
            outlet.flush()
        await asyncio.sleep(0.01)
        assert client.got == []
        client.let_go()
        await until(lambda: client.got == [(0, (7,))] and client.waiting is not None)
        draining = asyncio.create_task(outlet.drained())
        await asyncio.sleep(0)
        client.let_go()
        await draining
    assert client.got == [(0, (7,)), (0, (8, 9)), (1, (18, 19))] and client.messages == 2
    assert client.deltas[1].text == "<8><9>"


@in_virtual_time
async def test_a_write_that_need_not_wait_is_done_before_flush_returns() -> None:
    client = Client(instant=True)
    async with Outlet(client.write) as outlet:
        add(outlet, 0, 7)
        outlet.flush()
        assert client.got == [(0, (7,))]


@in_virtual_time
async def test_nothing_is_written_where_nothing_is_new() -> None:
    client = Client(instant=True)
    async with Outlet(client.write) as outlet:
        outlet.flush()
        await outlet.drained()
    assert client.messages == 0


@in_virtual_time
async def test_a_failed_write_is_raised_by_all_that_follows() -> None:
    client = Client(slow=True)
    async with Outlet(client.write) as outlet:
        add(outlet, 0, 7)
        outlet.flush()
        draining = asyncio.create_task(outlet.drained())
        await asyncio.sleep(0)
        client.let_go(ConnectionError("gone"))
        with pytest.raises(ConnectionError):
            await draining
        add(outlet, 0, 8)
        with pytest.raises(ConnectionError):
            outlet.flush()
    assert client.got == []


@in_virtual_time
async def test_within_an_interval_tokens_wait_and_go_out_as_one_message() -> None:
    client = Client(instant=True)
    async with Outlet(client.write) as outlet:
        outlet.open(lambda: 0.03, lambda delta, now: None)
        add(outlet, 0, 1)
        outlet.flush()
        for token in (2, 3):
            add(outlet, 0, token)
            add(outlet, 1, token)
            outlet.flush()
        assert client.got == [(0, (1,))]
        await until(lambda: client.messages == 2)
        assert client.got[1:] == [(0, (2, 3)), (1, (2, 3))]
        add(outlet, 0, 4)
        outlet.flush()
        assert client.messages == 2
        add(outlet, 1, 4)
        outlet.flush(at_once=True)  # an end does not wait for the interval, and is sent with the pending delta
        assert client.got[3:] == [(0, (4,)), (1, (4,))]
        await asyncio.sleep(0.05)
        assert client.messages == 3


@pytest.mark.parametrize("fails", ["leaves", "write"])
@in_virtual_time
async def test_a_failure_when_an_interval_is_over_is_raised_by_the_next_flush(fails: str) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    broken = False
    async with Outlet(lambda deltas: fail() if broken and fails == "write" else None) as outlet:
        outlet.open(lambda: 0.01, lambda delta, now: fail() if broken and fails == "leaves" else None)
        add(outlet, 0, 1)
        outlet.flush()
        broken = True
        add(outlet, 0, 2)
        outlet.flush()
        await asyncio.sleep(0.03)
        with pytest.raises(RuntimeError, match="a bug"):
            outlet.flush()


@pytest.mark.parametrize(("error", "told"), [(Unavailable("over"), True), (asyncio.CancelledError(), False)])
@in_virtual_time
async def test_after_an_error_its_client_is_sent_what_came_before_it(error: BaseException, told: bool) -> None:
    client = Client(instant=True)
    with pytest.raises(type(error)):
        async with Outlet(client.write) as outlet:
            outlet.open(lambda: 0.02, lambda delta, now: None)
            add(outlet, 0, 1)
            outlet.flush()
            add(outlet, 0, 2)
            outlet.flush()
            raise error
    await asyncio.sleep(0.04)
    assert client.got == [(0, (1,)), (0, (2,))][: 1 + told]


@in_virtual_time
async def test_a_client_that_does_not_read_is_not_waited_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlet_module, "LAST_WORD_S", 0.05)
    client = Client(slow=True)
    with pytest.raises(Unavailable):
        async with asyncio.timeout(3), Outlet(client.write) as outlet:
            add(outlet, 0, 1)
            outlet.flush()
            raise Unavailable("over")
    assert client.got == []


# --- with a session


class Receiver:
    """A receiver that records outputs and flushes an outlet as the gateway's does."""

    def __init__(self, outlet: Outlet, error: Exception | None = None) -> None:
        self.outlet = outlet
        self.error = error
        self.flushes = 0
        self.group: SubmittedGroup | None = None

    def take_token(self, sample: int, output_index: int, token_id: int) -> None:
        if self.error is not None:
            raise self.error
        add(self.outlet, sample, token_id)

    def take(self, output: pb.SequenceOutput) -> None:
        add(self.outlet, output.sample_index, *output.token_ids)
        delta_of(self.outlet, output.sample_index).finish_reason = FinishReason.LENGTH
        assert self.group is not None
        self.group.end()

    def flush(self) -> None:
        self.flushes += 1
        self.outlet.flush(at_once=self.group is not None and self.group.is_over)


class Session:
    """A session without a connection. `receive` does the work of its reader for one message."""

    def __init__(self) -> None:
        self.session = DecodeSession(make_record("decode", "d0"), lambda worker, load: None, LivenessLimits())
        self.session.connected = True

    def submit(self, receiver: Receiver, samples: int = 2) -> SubmittedGroup:
        receiver.group = self.session.submit(pb.Submit(), range(samples), receiver)
        return receiver.group

    def receive(self, *tokens: tuple[int, int, int], ends: tuple[int, int] | None = None, attempt: int = 0) -> None:
        """Receives plain tokens (handle, sample, token) and a last output (handle, sample)."""
        message = pb.SessionResponse(load=WorkerLoad())
        plain = message.plain_tokens
        for handle, sample, token in tokens:
            plain.handles.append(handle)
            plain.attempts.append(attempt)
            plain.sample_indices.append(sample)
            plain.output_indices.append(0)
            plain.token_ids.append(token)
        if ends is not None:
            message.outputs.add(handle=ends[0], attempt=attempt, sample_index=ends[1], token_ids=[99], finish_reason=1)
        self.session._dispatch(message)


@in_virtual_time
async def test_what_a_message_brings_a_group_is_flushed_together() -> None:
    session, clients = Session(), [Client(instant=True), Client(instant=True)]
    receivers = [Receiver(Outlet(client.write)) for client in clients]
    for receiver in receivers:
        session.submit(receiver)
    session.receive((1, 0, 5), (1, 1, 7), (2, 0, 6), (2, 1, 8), ends=(1, 0))
    assert [receiver.flushes for receiver in receivers] == [2, 1]
    assert clients[0].got == [(0, (5,)), (1, (7,)), (0, (99,))] and clients[1].got == [(0, (6,)), (1, (8,))]


@in_virtual_time
async def test_outputs_of_another_attempt_or_of_no_group_are_dropped() -> None:
    session, client = Session(), Client(instant=True)
    session.submit(Receiver(Outlet(client.write)))
    session.receive((1, 0, 5), ends=(1, 0), attempt=3)
    session.receive((7, 0, 5), ends=(7, 0))
    assert client.got == []


@in_virtual_time
async def test_a_receiver_that_fails_ends_its_group_and_no_other() -> None:
    session, client = Session(), Client(instant=True)
    wrong = Receiver(Outlet(client.write), RuntimeError("a bug"))
    broken, right = session.submit(wrong), session.submit(Receiver(Outlet(client.write)))
    session.receive((1, 0, 5), (1, 0, 6), (2, 0, 7))
    with pytest.raises(RuntimeError, match="a bug"):
        await broken.wait()
    assert client.got == [(0, (7,))] and not right.is_over and wrong.flushes == 1


@in_virtual_time
async def test_a_session_that_ends_fails_its_groups_once() -> None:
    session = Session()
    group = session.submit(Receiver(Outlet(lambda deltas: None)))
    session.session._fail_all()
    group.fail(RuntimeError("later"))
    group.end()
    with pytest.raises(WorkerLost):
        await group.wait()


@in_virtual_time
async def test_an_end_that_comes_when_the_interval_is_over_ends_the_request() -> None:
    """The timer is due in the same turn of the loop in which the end arrives."""
    session, client = Session(), Client(instant=True)
    receiver = Receiver(Outlet(client.write))
    receiver.outlet.open(lambda: 0.02, lambda delta, now: None)
    group = session.submit(receiver, samples=1)
    session.receive((1, 0, 4))
    session.receive((1, 0, 5))

    def late() -> None:
        asyncio.get_running_loop().call_soon(lambda: session.receive(ends=(1, 0)))
        time.sleep(0.05)

    asyncio.get_running_loop().call_soon(late)
    async with asyncio.timeout(5):
        await group.wait()
    assert client.got in ([(0, (4,)), (0, (5, 99))], [(0, (4,)), (0, (5,)), (0, (99,))])
    assert client.deltas[-1].finish_reason is FinishReason.LENGTH


# --- with the whole gateway


async def answer(rig: Rig, client: Client, **wanted: Any) -> list[Item]:
    """Returns all deltas in the order in which they were written."""
    request = await rig.validator.resolve(
        Wanted(**{"prompt": IdsPrompt(PROMPT), "max_tokens": 12, "temperature": 0.0, **wanted})
    )
    async with Outlet(client.write) as outlet:
        await rig.runner.run(request, outlet)
    return client.got


def ids(items: list[Item], sample: int = 0) -> list[int]:
    return [token for index, tokens in items if index == sample for token in tokens]


async def test_with_few_streams_every_step_is_a_message_and_all_tokens_are_counted(make_rig: MakeRig) -> None:
    rig, client = await make_rig(Script(step_s=0.05)), Client()
    assert ids(await answer(rig, client)) == expected_ids(PROMPT, 12) and len(client.got) == 12
    assert rig.metric("vllm:generation_tokens_total") == 12
    assert rig.metric("vllm:inter_token_latency_seconds_count") == 11


@pytest.mark.parametrize("wanted", [{}, {"logprobs": 1}, {"stop": ["no such text"]}])
async def test_samples_of_a_group_keep_apart(make_rig: MakeRig, wanted: Any) -> None:
    rig, client = await make_rig(Script(step_s=0.01)), Client()
    items = await answer(rig, client, n=3, **wanted)
    assert [ids(items, sample) for sample in range(3)] == [expected_ids(PROMPT, 12, sample) for sample in range(3)]
    assert client.messages < len(items), "what a step brings a group goes out together"


async def test_tokens_that_come_while_a_write_waits_follow_it_in_order(make_rig: MakeRig) -> None:
    rig, client = await make_rig(Script(step_s=0.002)), Client(slow=True)
    task = asyncio.create_task(answer(rig, client, max_tokens=40))
    while not task.done():
        await asyncio.sleep(0.011)
        if client.waiting is not None and not client.waiting.done():
            client.let_go()
    assert ids(await task) == expected_ids(PROMPT, 40) and client.messages < 40


async def test_a_client_that_does_not_read_holds_no_place(make_rig: MakeRig) -> None:
    rig, client = await make_rig(), Client(slow=True)
    task = asyncio.create_task(answer(rig, client))
    await until(lambda: rig.script.submitted and rig.gate.inside == 0)
    assert not task.done() and client.got == []
    client.slow = False
    client.let_go()
    assert ids(await task) == expected_ids(PROMPT, 12)


@pytest.mark.parametrize(
    "fault", [Fault("reject", 4, pb.REJECTION_GIVEN_BACK), Fault("die", 4), Fault("repeat", 4), Fault("gap", 4)]
)
async def test_what_has_left_is_not_produced_again(make_rig: MakeRig, fault: Fault) -> None:
    rig, client = await make_rig(Script(submits=[fault], step_s=0.01)), Client()
    assert ids(await answer(rig, client)) == expected_ids(PROMPT, 12)


async def test_a_failure_on_the_way_out_ends_the_request_not_the_session(make_rig: MakeRig) -> None:
    rig, client, other = await make_rig(Script(step_s=0.01)), Client(), Client()

    async def fails(deltas: list[Delta]) -> None:
        raise RuntimeError("a bug")

    client.write = fails  # type: ignore[method-assign]
    wrong, right = await asyncio.gather(answer(rig, client), answer(rig, other), return_exceptions=True)
    assert isinstance(wrong, RuntimeError) and not isinstance(right, BaseException)
    assert ids(right) == expected_ids(PROMPT, 12)
    await until(lambda: len(rig.script.cancelled) == 1)


@pytest.mark.parametrize("instant", [False, True])
@pytest.mark.parametrize("wanted", [{}, {"stop": ["no such text"]}])
async def test_with_many_streams_the_tokens_of_several_steps_go_out_together(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, instant: bool, wanted: Any
) -> None:
    monkeypatch.setattr(runner_module, "MESSAGE_COST_S", 0.001)
    lengths = [40 + i % 20 for i in range(2 * FEW_STREAMS)]
    rig, clients = await make_rig(Script(step_s=0.002)), [Client(instant=instant) for _ in lengths]
    async with asyncio.timeout(60):
        answers = await asyncio.gather(
            *(answer(rig, c, max_tokens=n, n=1 + n % 2, **wanted) for c, n in zip(clients, lengths, strict=True))
        )
    for items, n in zip(answers, lengths, strict=True):
        assert [ids(items, i) for i in range(1 + n % 2)] == [expected_ids(PROMPT, n, i) for i in range(1 + n % 2)]
    num_tokens = sum(n * (1 + n % 2) for n in lengths)
    assert rig.metric("vllm:generation_tokens_total") == num_tokens
    assert sum(client.messages for client in clients) < num_tokens / 2


@pytest.mark.parametrize(
    ("timings", "told"),
    [
        (Timings(hand_over_ns=3, decode_ns=5), lambda times: (times.hand_over_ns, times.decode_ns) == (3, 5)),
        (Timings(hand_over_ns=3), lambda times: times.hand_over_ns == 0 and times.decode_ns > 1_000_000),
    ],
)
async def test_decode_time_is_the_workers_account_or_else_the_gateways(
    make_rig: MakeRig, timings: Timings, told: Callable[[Any], bool]
) -> None:
    client = Client()
    rig = await make_rig(Script(step_s=0.01, timings=timings))
    await answer(rig, client)
    summary = client.deltas[-1].summary
    assert summary is not None and told(summary.timings)
