"""What a decode worker tells its gateways: one message per session and step. Knows nothing of gRPC or blocks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from common.types import FinishReason, Timings, TokenLogprob, WorkerLoad
from decode_svc.scheduler import Group

TELL_S = 1.0
"""How often a session with waiting groups only hears of the worker."""


class Rejection(Enum):
    """Why a group left this worker unfinished."""

    GIVEN_BACK = "given back"
    LOST = "lost"
    QUEUE_FULL = "queue full"
    DEADLINE = "deadline"
    TOO_LARGE = "too large"
    DRAINING = "draining"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Output:
    """What one step brought one sequence."""

    handle: int
    attempt: int
    sample_index: int = 0
    first_index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    rejection: Rejection | None = None
    timings: Timings | None = None


Send = Callable[[list[Output], WorkerLoad], None]


class Session:
    """One gateway's sequences on this worker."""

    __slots__ = ("groups", "outputs", "send")

    def __init__(self, send: Send) -> None:
        self.send = send
        self.groups: dict[int, Group] = {}
        self.outputs: list[Output] = []


class Outbox:
    """Whose every group is, and what its session is to hear at the end of the step."""

    def __init__(self) -> None:
        self._sessions: dict[Group, Session] = {}
        self._touched: set[Session] = set()
        self._told_at = 0.0

    def __contains__(self, group: Group) -> bool:
        """Whether the group is still here."""
        return group in self._sessions

    def open(self, session: Session, group: Group) -> None:
        session.groups[group.handle] = group
        self._sessions[group] = session

    def close(self, group: Group) -> None:
        session = self._sessions.pop(group)
        session.groups.pop(group.handle, None)

    def emit(self, group: Group, output: Output) -> None:
        session = self._sessions[group]
        session.outputs.append(output)
        self._touched.add(session)

    def refuse(self, session: Session, group: Group, rejection: Rejection) -> None:
        """Of a group that was not opened."""
        session.outputs.append(Output(group.handle, group.attempt, rejection=rejection))
        self._touched.add(session)

    def flush(self, load: WorkerLoad) -> None:
        """One message per session; to sessions without news the load, once a second, as a sign of life."""
        now = time.monotonic()
        if now - self._told_at >= TELL_S:
            self._told_at = now
            self._touched.update(self._sessions.values())
        for session in self._touched:
            session.send(session.outputs, load)
            session.outputs = []
        self._touched.clear()
