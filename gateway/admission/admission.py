"""The admission control, which admits a request or refuses it at once. This module does no I/O.

There are two checks. When a request's headers have arrived, `Admission.enter` checks the queue, the predicted wait and
the tenant's requests per minute. When its body has been read, `Entry.take` checks its priority, its number of sequences
and the tenant's tokens per minute. The limit on the queue counts the sequences of all tenants. While the queue is full,
a tenant within an even share of the queue is still admitted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from enum import StrEnum
from types import TracebackType
from typing import Self

from common.errors import InvalidArgument, LooseleafError, PermissionDenied, ResourceExhausted, Unavailable
from gateway.admission.gate import Gate
from gateway.admission.open_answers import OpenAnswers
from gateway.admission.tenants import Bucket, Tenants
from gateway.intake.resolved_request import ResolvedRequest

RETRY_AFTER_S = 1.0
"""The retry time in seconds while the gateway is draining or no wait can be predicted, and the shortest retry time when
the queue is full.
"""


class Reason(StrEnum):
    """The reason why a request was refused."""

    DRAINING = "draining"
    QUEUE_FULL = "queue_full"
    QUEUE_WAIT = "queue_wait"
    REQUESTS = "requests_per_minute"
    TOKENS = "tokens_per_minute"
    PRIORITY = "best_priority"


class Admission:
    """The admission control of one gateway. It counts the sequences of every admitted request until the request
    ends.
    """

    def __init__(
        self,
        limit: int,
        max_wait_s: float,
        gate: Gate,
        tenants: Tenants,
        on_refusal: Callable[[Reason], None] = lambda reason: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`limit` is a number of sequences. A request is refused if its predicted wait for a place exceeds
        `max_wait_s`.
        """
        self._limit = limit
        self._max_wait_s = max_wait_s
        self._gate = gate
        self._tenants = tenants
        self._on_refusal = on_refusal
        self._clock = clock
        self._sequences: Counter[str] = Counter()
        """Number of sequences per tenant. A tenant without sequences has no entry."""
        self._coming: Counter[str] = Counter()
        """Number of requests of each tenant that have not been read yet, and therefore have not reached the gate."""
        self.current = 0
        """Number of sequences of all tenants."""
        self.num_requests = 0
        self.draining = False
        self.answers = OpenAnswers()

    def check(self, tenant: str) -> None:
        """Makes the same checks as `enter` and raises the same errors, but admits no request."""
        if self.draining:
            raise self._refusal(
                Reason.DRAINING, Unavailable("this gateway is shutting down", retry_after_s=RETRY_AFTER_S)
            )
        self._check_room(tenant, 1)
        self._check_wait(tenant, 0)
        self._check_bucket(self._tenants.requests(tenant), 1, Reason.REQUESTS)

    def enter(self, tenant: str = "") -> Entry:
        """Admits a request whose headers have arrived. The entry must be used in a `with` statement.

        Raises ResourceExhausted if the queue is full, the predicted wait is too long or the tenant's quota of requests
        is used up, and Unavailable while draining. Each error has a retry time.
        """
        self.check(tenant)
        self._take(self._tenants.requests(tenant), 1)
        self._add(tenant, 1)
        self._coming[tenant] += 1
        self.num_requests += 1
        return Entry(self, tenant)

    def wait_s(self, tenant: str = "", priority: int = 0) -> float | None:
        """Returns the longest time, in seconds, for which a request arriving now is likely to wait, or None until a
        rate has been measured.
        """
        return self._gate.wait_s(tenant, priority, self._coming)

    def used(self, tenant: str, num_tokens: int) -> None:
        """Charges `num_tokens` tokens, computed or cached, to the tenant's budget. A negative number is credited."""
        self._take(self._tenants.tokens(tenant), num_tokens)

    # --- for entries

    def take(self, entry: Entry, requests: Sequence[ResolvedRequest]) -> None:
        """Does the work of `Entry.take`."""
        tenant, priority = entry.tenant, min(request.priority for request in requests)
        width = sum(request.sampling.width for request in requests)
        self._check_width(requests, width)
        more = width - entry.num_sequences
        cost = sum(request.cost for request in requests)
        self._check_priority(tenant, priority)
        self._check_room(tenant, more)
        if priority > 0:  # `enter` has checked the wait at priority 0
            self._check_wait(tenant, priority)
        self._check_batch(self._tenants.requests(tenant), len(requests))
        self._check_bucket(self._tenants.tokens(tenant), cost, Reason.TOKENS)
        self._take(self._tenants.requests(tenant), len(requests) - 1)
        self._take(self._tenants.tokens(tenant), cost)
        self._add(tenant, more)
        self._has_come(entry)
        entry.num_sequences += more
        entry.reserved_tokens = cost

    def leave(self, entry: Entry) -> None:
        """Does the work of `Entry.close`."""
        self._add(entry.tenant, -entry.num_sequences)
        self._has_come(entry)
        self.num_requests -= 1
        if entry.reserved_tokens:
            self.used(entry.tenant, -entry.reserved_tokens)

    # --- inside

    def _check_width(self, requests: Sequence[ResolvedRequest], width: int) -> None:
        """Raises InvalidArgument if the queue never has room for this many sequences."""
        if width > self._limit:
            single = "n" if requests[0].sampling.beam_width is None else "beam_width"
            raise InvalidArgument.of(
                single if len(requests) == 1 else "prompt",
                f"must make at most {self._limit} sequences (max_queue), got {width}",
            )

    def _check_room(self, tenant: str, count: int) -> None:
        """Raises ResourceExhausted if `count` more sequences would exceed both the limit and the tenant's share. The
        limit is shared evenly among this tenant and the other tenants that have sequences.
        """
        present = len(self._sequences) + (tenant not in self._sequences)
        share = min(self._limit, max(1, self._limit // present))
        own = self._sequences.get(tenant, 0) + count
        if count <= 0 or self.current + count <= self._limit or own <= share:
            return
        text = f"the queue is full: the limit is {self._limit} sequences at once (max_queue)"
        if present > 1:
            text += f", of which {share} are yours while others wait"
        wait = self.wait_s(tenant)
        retry = RETRY_AFTER_S if wait is None else max(RETRY_AFTER_S, wait)
        raise self._refusal(Reason.QUEUE_FULL, ResourceExhausted(text, retry_after_s=retry))

    def _check_wait(self, tenant: str, priority: int) -> None:
        wait = self.wait_s(tenant, priority)
        if wait is None or wait <= self._max_wait_s:
            return
        text = f"the wait would be {wait:.1f} s; the limit is {self._max_wait_s:g} s (max_queue_wait)"
        raise self._refusal(Reason.QUEUE_WAIT, ResourceExhausted(text, retry_after_s=wait))

    def _check_bucket(self, bucket: Bucket | None, amount: int, reason: Reason) -> None:
        """Raises ResourceExhausted if `amount` cannot be taken from the bucket now."""
        if bucket is not None and amount > 0 and (wait := bucket.wait_s(amount, self._clock())) > 0:
            text = f"the limit of your key is {bucket.per_minute} {reason.value.replace('_', ' ')}"
            raise self._refusal(reason, ResourceExhausted(text, retry_after_s=wait))

    def _check_batch(self, bucket: Bucket | None, count: int) -> None:
        """Raises ResourceExhausted if `count` prompts cannot be taken from the bucket now. `enter` has taken one of
        them. If the batch is refused, this one is returned, so that the batch is admitted after the retry time.
        """
        if bucket is None or count == 1:
            return
        bucket.take(-1, self._clock())
        self._check_bucket(bucket, count, Reason.REQUESTS)
        bucket.take(1, self._clock())

    def _take(self, bucket: Bucket | None, amount: int) -> None:
        if bucket is not None:
            bucket.take(amount, self._clock())

    def _check_priority(self, tenant: str, priority: int) -> None:
        best = self._tenants.best_priority(tenant)
        if best is not None and priority < best:
            text = f"priority {priority} is below {best}, the lowest that your key may use"
            raise self._refusal(Reason.PRIORITY, PermissionDenied(text))

    def _add(self, tenant: str, count: int) -> None:
        self.current += count
        self._sequences[tenant] += count
        if not self._sequences[tenant]:
            del self._sequences[tenant]

    def _has_come(self, entry: Entry) -> None:
        """Notes that the request has reached the gate, or that it will not reach the gate."""
        if entry.is_coming:
            entry.is_coming = False
            self._coming[entry.tenant] -= 1
            if not self._coming[entry.tenant]:
                del self._coming[entry.tenant]

    def _refusal(self, reason: Reason, error: LooseleafError) -> LooseleafError:
        self._on_refusal(reason)
        return error


class Entry:
    """The record of an admitted request, which counts against the limits until `close`."""

    def __init__(self, admission: Admission, tenant: str) -> None:
        self._admission = admission
        self._closed = False
        self.tenant = tenant
        self.num_sequences = 1
        self.is_coming = True
        """Whether the request has not been read yet."""
        self.reserved_tokens = 0
        """Tokens taken from the tenant's budget in advance. `close` credits them."""

    def take(self, requests: Sequence[ResolvedRequest]) -> None:
        """Admits all sequences of an HTTP or gRPC request that has been read, or none of them. `requests` contains one
        request for each prompt.

        Raises InvalidArgument if the queue is too small for the sequences, and PermissionDenied if the tenant may not
        use the priority. Raises ResourceExhausted, with a retry time, if the queue has no room for the sequences, the
        predicted wait is too long or a quota of the tenant is used up.
        """
        self._admission.take(self, requests)

    def close(self) -> None:
        """Stops counting the request's sequences and credits its reserved tokens. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._admission.leave(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
