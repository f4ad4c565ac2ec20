"""The record of a group's place on a decode worker, from the choice of the worker until the group ends or is lost."""

from __future__ import annotations

import time
from typing import Self

from gateway.fleet.decode_client import DecodeSession
from gateway.fleet.routing import Router
from gateway.fleet.worker_state import Pick


class DecodePlace:
    """A group's place on a decode worker. The place counts as taken until the end of its `with` block."""

    __slots__ = ("_began", "_num_sequences", "_router", "_state", "considered", "num_steps",
                 "session")  # fmt: skip

    def __init__(self, session: DecodeSession, pick: Pick, router: Router, num_sequences: int) -> None:
        self.session = session
        self.considered = pick.considered
        """The decode workers that were considered, the best first."""
        self.num_steps = 0
        """Number of steps in which the group has decoded. Set before the block ends."""
        self._state = pick.worker
        self._router = router
        self._num_sequences = num_sequences
        self._began = time.monotonic()
        self._state.dispatched_sequences += num_sequences

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._state.dispatched_sequences -= self._num_sequences
        if kind is None:
            self._router.costs.note_decode(time.monotonic() - self._began, self.num_steps)

    def suspect(self) -> None:
        self._router.suspect(self._state.record.worker_id, time.monotonic())
