"""Decides whether and when a request whose attempt was lost is prefilled again.

The number of lost attempts is limited. An attempt that decode gave back for lack of blocks does not count, and the next
attempt waits until there are enough blocks. A request is refused if two workers have died while they processed it
(`isolation`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from common.telemetry import Burst
from gateway.admission.gate import Gate, Place
from gateway.fleet.worker_lost import WorkerLost, too_late
from gateway.fleet.workers import Workers
from gateway.metrics import Metrics
from gateway.request.isolation import Isolation
from gateway.request.state import RequestState
from protos.v1 import inference_pb2 as pb

logger = logging.getLogger("requests")
PAUSE_S = 0.02
"""The pause in seconds before the next attempt is this time multiplied by the number of counted losses."""


class Retry:
    """The retry policy for lost attempts."""

    def __init__(
        self, workers: Workers, gate: Gate, isolation: Isolation, metrics: Metrics, *, max_attempts: int
    ) -> None:
        self._workers = workers
        self._gate = gate
        self._isolation = isolation
        self._metrics = metrics
        self._max_attempts = max_attempts
        self._again = Burst(_log)

    async def prepare(self, state: RequestState, place: Place, lost: WorkerLost) -> None:
        """Records a loss and waits until the next attempt may begin. Raises the error for the client if no further
        attempt is allowed.
        """
        state.explanation.end_attempt(lost.reason, state.output_len)
        state.explanation.enter(pb.PHASE_KIND_COME_BACK if lost.given_back else pb.PHASE_KIND_RETRY)
        state.trace.end_attempt("" if lost.given_back else lost.reason)
        self._account(state, lost)
        if lost.given_back:
            await self._come_back(state, place)
        else:
            await asyncio.sleep(min(PAUSE_S * state.losses, state.remaining_s()))

    def _account(self, state: RequestState, lost: WorkerLost) -> None:
        self._metrics.retried(lost.reason)
        state.losses += lost.counted
        logger.debug("request %s is prefilled again: %s", state.request.request_id, lost.reason)
        self._again.note(lost.reason)
        if state.output_len > state.decoded_from:
            self._isolation.survived(state.digest)
        if lost.death is not None:
            self._isolation.died(state.digest, lost.death)
            self._isolation.check(state.digest)
        if state.losses >= self._max_attempts:
            raise lost.final

    async def _come_back(self, state: RequestState, place: Place) -> None:
        """Waits until there are enough blocks for a group that decode gave back. New requests of the same or a worse
        rank wait behind the group.
        """
        try:
            async with asyncio.timeout(state.remaining_s()):
                await self._gate.come_back(place, lambda: self._workers.promise(place, state.blocks_to_come_back))
        except TimeoutError:
            raise too_late(state.request.timeout_s) from None
        state.took(queue_ns=state.explanation.leave())


def _log(reasons: list[str]) -> None:
    counts = ", ".join(f"{reason} {count}" for reason, count in Counter(reasons).items())
    logger.info("%d requests are prefilled again: %s", len(reasons), counts)
