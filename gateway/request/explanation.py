"""Records the phases and the attempts of one request, and the workers that were considered for the attempts.

The record is the message that `Explain` returns. It is filled in while the request runs, and its size is bounded. There
are no gaps between phases: each phase begins when the previous phase ends. A worker's report divides the phase of its
call into parts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from common import convert
from gateway.fleet.worker_state import Considered
from gateway.request.delta import Summary
from protos.v1 import decode_pb2, prefill_pb2
from protos.v1 import inference_pb2 as pb
from protos.v1 import types_pb2 as types_pb

MOST_PHASES = 256
"""Once there are this many phases, a further phase adds its time to the last phase of its kind, if there is one."""
MOST_ATTEMPTS = 32
MOST_BLOCKS = 1024
Kind = pb.PhaseKind
Part = tuple["Kind", int]
"""A part of a phase: its kind, and its length in nanoseconds."""


class Interval(NamedTuple):
    """A phase and its times, in nanoseconds, as `time.monotonic_ns` returns them."""

    kind: Kind
    attempt: int
    """The number of the attempt, counted from 1, or 0 before the first attempt."""
    start_ns: int
    end_ns: int


class Explanation:
    """The record of one request, from its arrival to the last message for its client."""

    def __init__(self, request_id: str, tenant: str, num_sequences: int, received_ns: int) -> None:
        """`received_ns` is the time, by `time.monotonic_ns`, at which the request was read. 0 means now."""
        now = time.monotonic_ns()
        self.tenant = tenant
        self._began_ns = received_ns or now
        self._from_ns = now
        """End of the last complete phase."""
        self._kind: Kind = pb.PHASE_KIND_GATE
        self._number = 0
        """Number of attempts so far. The record has entries for at most `MOST_ATTEMPTS` of them."""
        self._output_from = 0
        """The request's number of output tokens when the attempt began."""
        self._message = pb.Explanation(
            request_id=request_id,
            received_unix_ns=time.time_ns() - (now - self._began_ns),
            outcome="running",
            num_sequences=num_sequences,
        )
        self._add(pb.PHASE_KIND_INTAKE, now - self._began_ns)

    @property
    def request_id(self) -> str:
        return self._message.request_id

    @property
    def attempt(self) -> pb.AttemptExplanation:
        """The newest attempt."""
        return self._message.attempts[-1]

    @property
    def began_ns(self) -> int:
        """When the request was read, in nanoseconds of `time.monotonic_ns`."""
        return self._began_ns

    @property
    def from_ns(self) -> int:
        """When the current phase began or, at the end, when the last one ended, on the clock of `began_ns`."""
        return self._from_ns

    @property
    def wrote_first_ns(self) -> int | None:
        """When the first tokens were sent to the client, on the clock of `began_ns`, or None if none have been sent."""
        first_ns = self._message.first_token_ns
        return self._began_ns + first_ns if self._message.HasField("first_token_ns") else None

    def intervals(self) -> Iterator[Interval]:
        """Yields the phases that have ended, with their times. The times are inexact once there are more phases than
        `MOST_PHASES`.
        """
        at_ns = self._began_ns
        for phase in self._message.phases:
            yield Interval(phase.kind, phase.attempt, at_ns, at_ns := at_ns + phase.duration_ns)

    def snapshot(self) -> pb.Explanation:
        """Returns a copy of the record. If the request is still running, the current phase of the copy ends now."""
        found = pb.Explanation()
        found.CopyFrom(self._message)
        if found.outcome == "running":
            now = time.monotonic_ns()
            found.total_ns = now - self._began_ns
            found.phases.add(kind=self._kind, duration_ns=now - self._from_ns, attempt=self._number)
        return found

    # --- phases

    def enter(self, kind: Kind) -> None:
        """Ends the current phase and begins the next one."""
        self.leave()
        self._kind = kind

    def leave(self, parts: Sequence[Part] = (), rest: Kind | None = None) -> int:
        """Ends the current phase, and divides it into `parts` and a remainder, whose kind is `rest`, or the phase's own
        kind if `rest` is None. Returns the phase's length in nanoseconds. Until the next `enter`, time counts as
        TRANSPORT.
        """
        now = time.monotonic_ns()
        left_ns = length_ns = now - self._from_ns
        for kind, duration_ns in parts:
            self._add(kind, min(duration_ns, left_ns))
            left_ns -= min(duration_ns, left_ns)
        self._add(self._kind if rest is None else rest, left_ns)
        self._from_ns, self._kind = now, pb.PHASE_KIND_TRANSPORT
        return length_ns

    def _add(self, kind: Kind, duration_ns: int) -> None:
        phases = self._message.phases
        if duration_ns <= 0:
            return
        if phases and phases[-1].kind == kind and phases[-1].attempt == self._number:
            phases[-1].duration_ns += duration_ns
        elif len(phases) < MOST_PHASES or (same := _last_of(kind, phases)) is None:
            phases.add(kind=kind, duration_ns=duration_ns, attempt=self._number)
        else:
            same.duration_ns += duration_ns

    # --- attempts

    def begin_attempt(self, worker_id: str, considered: Iterable[Considered], output_len: int) -> None:
        """Notes that an attempt begins at a prefill worker. `output_len` is the request's number of output tokens."""
        self._number += 1
        self._output_from = output_len
        attempts = self._message.attempts
        attempt = attempts.add() if len(attempts) < MOST_ATTEMPTS else self.attempt
        attempt.prefill_worker, attempt.decode_worker, attempt.end = worker_id, "", ""
        del attempt.prefill_considered[:], attempt.decode_considered[:]
        attempt.prefill_considered.extend(map(_considered, considered))

    def prefilled(self, done: prefill_pb2.PrefillDone, *, elsewhere: bool = False) -> None:
        """Notes the sources of a prompt's KV after its prefill. Unless another call has run the prefill (`elsewhere`),
        ends the current phase and divides it into the times that the worker reported.
        """
        self.attempt.sources.CopyFrom(done.sources)
        if not elsewhere:
            timings = done.timings
            parts = ((pb.PHASE_KIND_PREFILL_QUEUE, timings.queue_ns), (pb.PHASE_KIND_PREFILL, timings.prefill_ns))
            self.leave(parts, pb.PHASE_KIND_TRANSPORT)

    def handed_over(self, ticket: types_pb.Ticket, num_tokens: int) -> None:
        """Notes how many tokens and blocks are handed over to decode, and the first `MOST_BLOCKS` of the blocks."""
        tables = [table for branch in ticket.branches for table in branch.groups]
        refs = dict.fromkeys(ref for table in tables for ref in zip(table.blocks, table.generations, strict=True))
        attempt = self.attempt
        attempt.handed_over_tokens, attempt.handed_over_blocks = num_tokens, len(refs)
        attempt.arena_id = ticket.arena_id
        attempt.blocks[:] = [block for block, _ in islice(refs, MOST_BLOCKS)]
        attempt.generations[:] = [generation for _, generation in islice(refs, MOST_BLOCKS)]

    def decoding(self, worker_id: str, considered: Iterable[Considered]) -> None:
        """Notes that the group is submitted to a decode worker."""
        self.attempt.decode_worker = worker_id
        self.attempt.decode_considered.extend(map(_considered, considered))
        self.enter(pb.PHASE_KIND_DECODE)

    def decoded(self, account: decode_pb2.GroupAccount, decode_ns: int | None) -> int:
        """Notes a decode worker's account of a group, ends the current phase, and divides it into the times that the
        worker reported. Returns the phase's length in nanoseconds. `decode_ns` is the time from the claim to the end,
        or None if the group left before its end.
        """
        attempt = self.attempt
        attempt.copied_blocks += account.copied_blocks
        attempt.swapped_out_blocks += sum(swap.blocks_out for swap in account.swaps)
        attempt.swapped_in_blocks += sum(swap.blocks_in for swap in account.swaps)
        attempt.num_swaps += len(account.swaps)
        parts = list(_decode_parts(account, decode_ns))
        return self.leave(parts, pb.PHASE_KIND_DECODE if decode_ns is None else pb.PHASE_KIND_TRANSPORT)

    def end_attempt(self, end: str, output_len: int) -> None:
        """Notes why the attempt has ended and how many tokens it has produced. `output_len` is the request's number of
        output tokens. Has no effect if no attempt is open.
        """
        if self._message.attempts and not self.attempt.end:
            self.attempt.end = end
            self.attempt.output_tokens += output_len - self._output_from

    def pulled(self, num_tokens: int) -> None:
        """Notes how many token positions were copied to the decode worker's arena."""
        self.attempt.sources.transferred_tokens += num_tokens

    # --- the end

    def wrote_first(self) -> None:
        """Notes that the first tokens are being sent to the client."""
        self._message.first_token_ns = time.monotonic_ns() - self._began_ns

    def end(self, outcome: str, error: str, summary: Summary) -> None:
        """Ends the last phase and completes the record. `error` is the message of the error, or empty."""
        self.leave()
        message = self._message
        message.outcome, message.error = outcome, error
        message.total_ns = self._from_ns - self._began_ns
        message.usage.CopyFrom(usage_to_pb(summary))
        message.timings.CopyFrom(convert.timings_to_pb(summary.timings))


def usage_to_pb(summary: Summary) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=summary.prompt_tokens,
        completion_tokens=summary.completion_tokens,
        sources=convert.sources_to_pb(summary.sources),
        handed_over_tokens=summary.handed_over_tokens,
    )


def _decode_parts(account: decode_pb2.GroupAccount, decode_ns: int | None) -> Iterator[Part]:
    """Yields the parts of a call to decode, in order: the claim, the wait for a place, then steps and swaps."""
    yield pb.PHASE_KIND_HAND_OVER, account.claim_ns
    yield pb.PHASE_KIND_DECODE_QUEUE, account.waiting_ns
    at_ns = account.waiting_ns
    for swap in account.swaps:
        yield pb.PHASE_KIND_DECODE, max(0, swap.start_ns - at_ns)
        yield pb.PHASE_KIND_SWAPPED, swap.duration_ns
        at_ns = swap.start_ns + swap.duration_ns
    if decode_ns is not None:
        yield pb.PHASE_KIND_DECODE, max(0, decode_ns - at_ns)


def _considered(worker: Considered) -> pb.ConsideredWorker:
    return pb.ConsideredWorker(
        worker_id=worker.worker_id,
        predicted_s=worker.predicted_s,
        missing_tokens=worker.missing_tokens,
        delay_s=worker.delay_s,
        itl_s=worker.itl_s,
    )


def _last_of(kind: Kind, phases: Sequence[pb.Phase]) -> pb.Phase | None:
    return next((phase for phase in reversed(phases) if phase.kind == kind), None)
