"""Keeps prefills until a second call continues them, because some routers request prefill and decode separately.

The router passes only a random name from one call to the other. The gateway itself keeps the ticket, the ticket's
secret, the first tokens and the seed, so a caller cannot choose the first tokens. A prefill that no call continues in
time is dropped, and its ticket is given up.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from common.telemetry import Fallbacks
from common.types import StoppingParams
from gateway.admission.gate import Gate, Place
from gateway.fleet.routing import Route
from gateway.fleet.workers import Workers
from gateway.intake.resolved_request import ResolvedRequest
from protos.v1 import prefill_pb2

logger = logging.getLogger("requests")
KEEP_S = 6.0
"""Time in seconds for which a prefill waits. Its ticket ends after 8 s (`TICKET_LEASE_S` in
`block_store.ledger.scripts`), and decode needs some of the difference to claim the ticket.
"""
_NAME_BYTES = 16


@dataclass(frozen=True, slots=True)
class HeadStart:
    """The record of a completed prefill, with the place at the workers that its request occupies."""

    request: ResolvedRequest
    place: Place
    route: Route
    done: prefill_pb2.PrefillDone

    def fits(self, request: ResolvedRequest) -> bool:
        """Returns whether another request would have had the same prefill. The stopping parameters may differ, except
        for the stop tokens that `min_tokens` excludes from the first draw.
        """
        own = self.request
        return (
            (own.tenant, own.salt, own.public_tokens) == (request.tenant, request.salt, request.public_tokens)
            and own.prompt_ids == request.prompt_ids
            and own.adapter == request.adapter
            and own.sampling == request.sampling
            and _masked(own.stopping) == _masked(request.stopping)
        )


def _masked(stopping: StoppingParams) -> frozenset[int]:
    """Returns the stop tokens that `min_tokens` excludes from the first draw."""
    return frozenset(stopping.stop_token_ids if stopping.min_tokens else ())


class HeadStarts:
    """A table of the prefills that wait to be continued. Each prefill keeps its place at the workers, which limits the
    number of prefills.
    """

    def __init__(self, workers: Workers, gate: Gate, used: Callable[[str, int], None]) -> None:
        """`used(tenant, num_tokens)` is called for a prefill that is dropped."""
        self._workers = workers
        self._gate = gate
        self._used = used
        self.keep_s = KEEP_S
        self._waiting: dict[str, tuple[HeadStart, asyncio.TimerHandle]] = {}
        self.fallbacks = Fallbacks(logger)

    def put(self, start: HeadStart) -> str:
        """Keeps a prefill for `keep_s` seconds. Returns a name for the prefill, which cannot be guessed."""
        name = secrets.token_urlsafe(_NAME_BYTES)
        timer = asyncio.get_running_loop().call_later(self.keep_s, self._expire, name)
        self._waiting[name] = (start, timer)
        return name

    def seed(self, name: str) -> int | None:
        """Returns the seed with which a waiting prefill drew its tokens, or None if no prefill has this name."""
        waiting = self._waiting.get(name)
        return None if waiting is None else waiting[0].request.sampling.seed

    def take(self, name: str, request: ResolvedRequest) -> HeadStart | None:
        """Returns and removes the prefill with this name. The caller takes over the place and the ticket.

        Returns None if no prefill of this tenant has the name, or if the prefill does not fit the request. A prefill
        that does not fit is dropped.
        """
        waiting = self._waiting.get(name)
        if waiting is None:
            self.fallbacks.note("prefill not found", "it has expired, was continued before, or was never made")
            return None
        start, timer = waiting
        if start.request.tenant != request.tenant:
            self.fallbacks.note("prefill not found", "it belongs to another tenant")
            return None
        timer.cancel()
        del self._waiting[name]
        if not start.fits(request):
            self.fallbacks.note("prefill not usable", "decode was asked for a different prompt or sampling")
            self._drop(start)
            return None
        return start

    def _expire(self, name: str) -> None:
        start, _ = self._waiting.pop(name)
        self.fallbacks.note("prefill not continued", f"no call continued it within {self.keep_s:g} s")
        self._drop(start)

    def _drop(self, start: HeadStart) -> None:
        if start.done.HasField("ticket"):
            self._workers.give_up(start.done.ticket)
        self._gate.leave(start.place)
        self._used(start.request.tenant, len(start.request.prompt_ids))
