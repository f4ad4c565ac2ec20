"""A decode worker's messages to its gateways. The outputs of a step go to each session in one message."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from common.types import FinishReason, Timings, TokenLogprob, WorkerLoad
from decode_svc.history import History
from decode_svc.scheduler import Group
from engine.beam_search import Hypothesis
from engine.sampler import Sampled
from engine.sequence import Sequence

TELL_S = 1.0
"""Interval in seconds at which a session with groups also gets messages without outputs, which show that the worker is
alive.
"""


class Rejection(Enum):
    """The reason why a worker refused a group, or gave it up unfinished."""

    GIVEN_BACK = "given back"
    LOST = "lost"
    QUEUE_FULL = "queue full"
    DEADLINE = "deadline"
    TOO_LARGE = "too large"
    DRAINING = "draining"
    INTERNAL = "internal"
    GRAMMAR = "grammar"
    ADAPTER = "adapter"


@dataclass(frozen=True, slots=True)
class Account:
    """The record of a group's time on this worker, up to `now_ns`. Times are values of `time.monotonic_ns`."""

    arrived_ns: int
    claimed_ns: int
    """0 if the ticket was not claimed."""
    now_ns: int
    history: History


class PlainToken(NamedTuple):
    """An output that is a single token, without extra data, of a sequence that continues."""

    handle: int
    attempt: int
    sample_index: int
    output_index: int
    token_id: int

    def as_output(self) -> Output:
        return Output(self.handle, self.attempt, self.sample_index, self.output_index, (self.token_id,))


class Output(NamedTuple):
    """An output that is not a PlainToken: tokens with extra data, the end of a sequence, or a rejection."""

    handle: int
    attempt: int
    sample_index: int = 0
    first_index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    rejection: Rejection | None = None
    timings: Timings | None = None
    beam_score: float | None = None
    account: Account | None = None


AnyOutput = Output | PlainToken
Send = Callable[[list[AnyOutput], WorkerLoad], None]


class Session:
    """A gateway's session, with its groups on this worker and the outputs to send to the gateway."""

    __slots__ = ("groups", "on_left", "outputs", "send")

    def __init__(self, send: Send, on_left: Callable[[Group], object] = lambda group: None) -> None:
        """Creates a session. `send` sends outputs and the worker's load to the gateway. `on_left` is called in the step
        thread when a group has left the worker.
        """
        self.send = send
        self.on_left = on_left
        self.groups: dict[int, Group] = {}
        self.outputs: list[AnyOutput] = []


def timings_of(group: Group) -> Timings:
    """Returns the timings of a sequence that ends now."""
    now = time.monotonic_ns()
    return Timings(hand_over_ns=group.claimed_ns - group.arrived_ns, decode_ns=now - group.claimed_ns)


def account_of(group: Group) -> Account:
    """Returns the account of a group, as of now."""
    return Account(group.arrived_ns, group.claimed_ns, time.monotonic_ns(), group.history)


def of_token(group: Group, sequence: Sequence, index: int, sample: Sampled, reason: FinishReason | None) -> AnyOutput:
    """Returns the output for one token of a sample. `index` is the token's position in the sample's output."""
    if reason is None and sample.logprob is None:
        return PlainToken(group.handle, group.attempt, sequence.sample_index, index, sample.token_id)
    return Output(
        group.handle,
        group.attempt,
        sequence.sample_index,
        index,
        (sample.token_id,),
        () if sample.logprob is None else (sample.logprob,),
        reason,
        timings=None if reason is None else timings_of(group),
        account=None if reason is None else account_of(group),
    )


def of_beams(group: Group, best: Iterable[Hypothesis]) -> list[Output]:
    """Returns the results of a beam search, best first. A beam search has no other outputs."""
    timings, account = timings_of(group), account_of(group)
    return [
        Output(
            group.handle,
            group.attempt,
            rank,
            0,
            tuple(beam.token_ids),
            tuple(beam.logprobs),
            beam.finish_reason,
            timings=timings,
            beam_score=beam.score,
            account=account,
        )
        for rank, beam in enumerate(best)
    ]


class Outbox:
    """A collector of outputs, which `flush` sends in one message to each session."""

    def __init__(self) -> None:
        self._sessions: dict[Group, Session] = {}
        self._touched: set[Session] = set()
        self._told_at = 0.0

    def __contains__(self, group: Group) -> bool:
        """Returns whether the group is still on this worker."""
        return group in self._sessions

    def open(self, session: Session, group: Group) -> None:
        session.groups[group.handle] = group
        self._sessions[group] = session

    def close(self, group: Group) -> None:
        session = self._sessions.pop(group)
        session.groups.pop(group.handle, None)
        group.history.left_ns = time.monotonic_ns()
        session.on_left(group)

    def emit(self, group: Group, output: AnyOutput) -> None:
        """Adds an output to the next message to the group's session."""
        session = self._sessions[group]
        session.outputs.append(output)
        self._touched.add(session)

    def reject(self, group: Group, rejection: Rejection) -> None:
        group.history.rejection = rejection.value
        self.emit(group, Output(group.handle, group.attempt, rejection=rejection, account=account_of(group)))

    def refuse(self, session: Session, group: Group, rejection: Rejection) -> None:
        """Rejects a group that was not opened."""
        session.outputs.append(Output(group.handle, group.attempt, rejection=rejection))
        self._touched.add(session)

    def flush(self, load: WorkerLoad) -> None:
        """Sends a message to each session that has outputs. Every TELL_S seconds, also sends one to each session that
        has groups, to show that the worker is alive.
        """
        now = time.monotonic()
        if now - self._told_at >= TELL_S:
            self._told_at = now
            self._touched.update(self._sessions.values())
        for session in self._touched:
            session.send(session.outputs, load)
            session.outputs = []
        self._touched.clear()
