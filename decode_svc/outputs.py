"""A decode worker's messages to its gateways: one per session and step. Does not depend on gRPC or blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from enum import Enum
from typing import NamedTuple

from common.types import FinishReason, Timings, TokenLogprob, WorkerLoad
from decode_svc.scheduler import Group
from engine.beam_search import Hypothesis
from engine.sampler import Sampled
from engine.sequence import Sequence

TELL_S = 1.0
"""Interval of the messages that tell a session that the worker is alive while all of the session's groups wait."""


class Rejection(Enum):
    """The reason why a worker refused a group, or gave it up before it was finished."""

    GIVEN_BACK = "given back"
    LOST = "lost"
    QUEUE_FULL = "queue full"
    DEADLINE = "deadline"
    TOO_LARGE = "too large"
    DRAINING = "draining"
    INTERNAL = "internal"
    GRAMMAR = "grammar"
    ADAPTER = "adapter"


class PlainToken(NamedTuple):
    """The most common output: a single token, without extra data, of a sequence that continues."""

    handle: int
    attempt: int
    sample_index: int
    output_index: int
    token_id: int

    def as_output(self) -> Output:
        return Output(self.handle, self.attempt, self.sample_index, self.output_index, (self.token_id,))


class Output(NamedTuple):
    """The output of one sequence in one step, if it is more than a plain token."""

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


AnyOutput = Output | PlainToken
Send = Callable[[list[AnyOutput], WorkerLoad], None]


class Session:
    """The record of one gateway's groups on this worker, and of the outputs to send to the gateway."""

    __slots__ = ("groups", "outputs", "send")

    def __init__(self, send: Send) -> None:
        self.send = send
        self.groups: dict[int, Group] = {}
        self.outputs: list[AnyOutput] = []


def timings_of(group: Group) -> Timings:
    """Returns the timings of a sequence that ends now."""
    now = time.monotonic_ns()
    return Timings(hand_over_ns=group.claimed_ns - group.arrived_ns, decode_ns=now - group.claimed_ns)


def of_token(group: Group, sequence: Sequence, sample: Sampled, reason: FinishReason | None) -> AnyOutput:
    """Returns the output for the newest token of a sample, which `sequence` already contains."""
    index = len(sequence.output_ids) - 1
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
    )


def of_beams(group: Group, best: Iterable[Hypothesis]) -> list[Output]:
    """Returns the results of a beam search, best first. A search sends no other outputs."""
    timings = timings_of(group)
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
        )
        for rank, beam in enumerate(best)
    ]


class Outbox:
    """A collector of the groups' outputs. It sends one message per session at the end of the step."""

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

    def emit(self, group: Group, output: AnyOutput) -> None:
        """Adds an output to the message that the group's session gets at the end of the step."""
        session = self._sessions[group]
        session.outputs.append(output)
        self._touched.add(session)

    def reject(self, group: Group, rejection: Rejection) -> None:
        self.emit(group, Output(group.handle, group.attempt, rejection=rejection))

    def refuse(self, session: Session, group: Group, rejection: Rejection) -> None:
        """Rejects a group that was not opened."""
        session.outputs.append(Output(group.handle, group.attempt, rejection=rejection))
        self._touched.add(session)

    def flush(self, load: WorkerLoad) -> None:
        """Sends one message to each session that has outputs. Once a second, sessions that have groups but no outputs
        get the load, which shows that the worker is alive.
        """
        now = time.monotonic()
        if now - self._told_at >= TELL_S:
            self._told_at = now
            self._touched.update(self._sessions.values())
        for session in self._touched:
            session.send(session.outputs, load)
            session.outputs = []
        self._touched.clear()
