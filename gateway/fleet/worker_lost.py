"""Defines the error after which a request may be sent to workers again. The error itself does not reach clients: they
see a pause or, if no attempt is left, a status.
"""

from __future__ import annotations

import grpc
import grpc.aio

from common.errors import (
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    LooseleafError,
    ResourceExhausted,
    Unavailable,
)
from common.types import WorkerRecord
from protos.v1 import decode_pb2

GIVEN_BACK = "given_back"


class WorkerLost(Exception):
    """The error of an attempt that ended without an answer. The request may be prefilled again.

    The number of `counted` attempts is limited. A group that was given back for lack of blocks is not counted. `final`
    is the client's error if no attempt is left. `unreachable` means that a prefill worker or a block store did not
    answer. Routing then avoids the worker, or the pair of arenas, for a while (`routing.UNREACHABLE_S`).
    """

    def __init__(
        self,
        reason: str,
        *,
        counted: bool = True,
        suspect: bool = True,
        unreachable: bool = False,
        death: str | None = None,
        final: LooseleafError | None = None,
    ) -> None:
        super().__init__(reason)
        self.unreachable = unreachable
        self.death = death
        """The incarnation of the worker process that ended while it had the request, or None if no process is known to
        have ended.
        """
        self.reason = reason
        self.counted = counted
        self.suspect = suspect
        """Whether other workers should be preferred for a while."""
        self.given_back = reason == GIVEN_BACK
        self.final = final or Unavailable("the workers of this request were lost", retry_after_s=1.0)


def incarnation(worker: WorkerRecord) -> str:
    """Returns a name for one incarnation of a worker process. The worker's successor has a different name."""
    return f"{worker.worker_id.removesuffix('.' + worker.role)}@{worker.address}"


def is_death(error: grpc.aio.AioRpcError) -> bool:
    """Returns whether the error suggests that the peer's process has ended. After a keepalive timeout, the process may
    only be frozen, so it does not count as ended.
    """
    return error.code() is grpc.StatusCode.UNAVAILABLE and "timeout" not in (error.details() or "")


def queue_full(role: str) -> WorkerLost:
    """Returns the error for a worker whose queue is full."""
    return WorkerLost(
        "queue_full", final=ResourceExhausted(f"the queues of all {role} workers are full", retry_after_s=1.0)
    )


def internal(role: str) -> WorkerLost:
    return WorkerLost("internal", final=Internal(f"a {role} worker failed; its log says why"))


def rejected(rejection: int, timeout_s: float) -> Exception:
    """Returns the error for a request that a decode worker has rejected. `timeout_s` is the request's timeout."""
    if rejection == decode_pb2.REJECTION_GIVEN_BACK:
        return WorkerLost(GIVEN_BACK, counted=False, suspect=False)
    if rejection == decode_pb2.REJECTION_QUEUE_FULL:
        return queue_full("decode")
    if rejection == decode_pb2.REJECTION_DEADLINE:
        return too_late(timeout_s)
    if rejection == decode_pb2.REJECTION_TOO_LARGE:
        what = "and the prompt, for all samples or beams, need more blocks than a decode worker has for one request"
        return InvalidArgument.of("max_tokens", what)
    if rejection == decode_pb2.REJECTION_GRAMMAR:
        return InvalidArgument.of("structured_output", "became too complex after the tokens so far")
    if rejection == decode_pb2.REJECTION_INTERNAL:
        return internal("decode")
    if rejection == decode_pb2.REJECTION_ADAPTER:
        return WorkerLost("adapter_missing")
    if rejection == decode_pb2.REJECTION_DRAINING:
        return WorkerLost("draining")
    return WorkerLost("lost", suspect=False)


def too_late(timeout_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"the request took longer than its timeout of {timeout_s:g} s")
