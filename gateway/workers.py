"""All workers as one thing: who is ready, who gets a request, and the connections to them.

Joins the router (policy) with discovery, prefill calls and decode sessions (I/O). Load is counted here, at dispatch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from common.types import WorkerLoad, WorkerRecord
from gateway.lost import WorkerLost
from gateway.prefill_client import PrefillClient
from gateway.routing import Router, WorkerState
from gateway.sessions import DecodeSession, Limits, SessionPool
from protos.v1 import prefill_pb2

Lookup = Callable[[Sequence[WorkerRecord], Sequence[int], bytes], Awaitable[dict[str, int]]]
GATE_FACTOR = 1.25
GATE_EXTRA = 8
"""Requests with the workers beyond what decode can batch: those in prefill."""


class DecodePlace:
    """A request's place on a decode worker, counted until `release`."""

    __slots__ = ("_router", "_state", "session")

    def __init__(self, session: DecodeSession, state: WorkerState, router: Router) -> None:
        self.session = session
        self._state = state
        self._router = router
        state.dispatched_sequences += 1

    def release(self) -> None:
        self._state.dispatched_sequences -= 1

    def suspect(self) -> None:
        self._router.suspect(self._state.record.worker_id, time.monotonic())


class Workers:
    """The workers that the registry names, and the way to them."""

    def __init__(self, limits: Limits) -> None:
        self._router = Router()
        self._sessions = SessionPool(self._on_load, limits)
        self._prefills = PrefillClient(self._on_load, limits.silence_s)
        self._ready_at = time.monotonic()
        self._lookup: Lookup | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def use_lookup(self, lookup: Lookup) -> None:
        """How to find cached prefixes: `Discovery.cached_tokens`."""
        self._lookup = lookup

    def on_records(self, records: list[WorkerRecord]) -> None:
        """The registry's list, as often as it is polled."""
        self._router.update(records, time.monotonic())
        self._sessions.sync(records)
        if self.ready:
            self._ready_at = time.monotonic()
        addresses = [r.address for r in records if r.role == "prefill"]
        self._keep(asyncio.create_task(self._prefills.keep(addresses)))

    @property
    def ready(self) -> bool:
        """Whether some prefill worker has a decode partner whose session is open."""
        return self._router.ready(self._sessions.usable)

    def missing_for(self) -> float:
        """Seconds since there was a ready pair."""
        return 0.0 if self.ready else time.monotonic() - self._ready_at

    @property
    def max_model_len(self) -> int | None:
        return self._router.max_model_len()

    @property
    def states(self) -> Mapping[str, WorkerState]:
        return self._router.workers

    def gate_capacity(self) -> int:
        """How many requests may be with workers at a time."""
        return int(self._router.capacity() * GATE_FACTOR) + GATE_EXTRA

    async def pick_prefill(self, prompt_ids: Sequence[int], salt: bytes) -> WorkerRecord | None:
        """The worker to prefill on, None if no pair is ready. The prefix index is asked only if there is a choice."""
        records = [s.record for s in self._router.workers.values() if s.record.role == "prefill"]
        cached: dict[str, int] = {}
        if len(records) > 1 and self._lookup is not None:
            cached = await self._lookup(records, prompt_ids, salt)
        state = self._router.pick_prefill(len(prompt_ids), cached, time.monotonic(), self._sessions.usable)
        if state is None:
            return None
        return state.record

    async def prefill(
        self, worker: WorkerRecord, request: prefill_pb2.PrefillRequest, timeout_s: float
    ) -> prefill_pb2.PrefillDone:
        """Errors as `PrefillClient.prefill`; a worker that failed is passed over for a while."""
        state = self._router.workers.get(worker.worker_id)
        num_tokens = len(request.prompt_token_ids)
        if state is not None:
            state.dispatched_tokens += num_tokens
        try:
            return await self._prefills.prefill(worker, request, timeout_s)
        except WorkerLost as lost:
            if lost.unreachable:
                self._router.unreachable(worker.worker_id, time.monotonic())
            elif lost.suspect:
                self._router.suspect(worker.worker_id, time.monotonic())
            raise
        finally:
            if state is not None:
                state.dispatched_tokens -= num_tokens

    def pick_decode(self, prefill: WorkerRecord) -> DecodePlace | None:
        """A place on a decode worker that takes this prefill worker's tickets."""
        state = self._router.pick_decode(prefill, time.monotonic(), self._sessions.usable)
        session = None if state is None else self._sessions.get(state.record.worker_id)
        if state is None or session is None:
            return None
        return DecodePlace(session, state, self._router)

    async def close(self) -> None:
        self._sessions.close()
        await self._prefills.close()

    def _on_load(self, worker_id: str, load: WorkerLoad) -> None:
        self._router.report(worker_id, load, time.monotonic())

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
