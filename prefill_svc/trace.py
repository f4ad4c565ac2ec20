"""The spans of a prompt on a prefill worker. They are created in the event loop, from times that the step thread noted.

prefill                    from the request's arrival to its last event
  prefill.queue            until its blocks were found and allocated
    ledger.acquire         the calls that found and allocated them
  prefill.compute          the steps; each step but the last is an event `chunk` of `prefill`, and each early ticket is
                           an event `early ticket`
  ledger.hand_over         the call that moved the blocks to the ticket
"""

from __future__ import annotations

import time

from common.tracing import CURRENT, Tracer
from prefill_svc.events import ChunkDone, Done, Event
from prefill_svc.job import Job


class JobTrace:
    """The spans of one job, below the span of the caller."""

    def __init__(self, tracer: Tracer, job: Job) -> None:
        self._job = job
        self._span = tracer.begin("prefill", job.arrived_ns, CURRENT.get())
        CURRENT.set(self._span.context)
        self._num_chunks = 1
        self._noted_ns = job.arrived_ns

    def note(self, event: Event) -> None:
        """Records an event of the job. Do not pass an event that is repeated as a heartbeat."""
        self._noted_ns = time.monotonic_ns()
        if isinstance(event, ChunkDone) and event.early_ticket is not None:
            self._span.event("early ticket", self._noted_ns, {})
        elif isinstance(event, ChunkDone):
            self._num_chunks += 1
            self._span.event("chunk", self._noted_ns, {"looseleaf.computed_tokens": event.num_computed_tokens})

    def end(self, event: Event) -> None:
        """Ends the spans. `event` is the last event, which is a `ChunkDone` if the call ended first. Otherwise, the job
        ended when the event was noted: the gateway may have it before this method is called.
        """
        if self._span.is_recording:
            if isinstance(event, Done):
                self._add_done(event)
            error = "" if isinstance(event, Done) else getattr(event, "grpc_code", "CANCELLED")
            self._span.end(time.monotonic_ns() if isinstance(event, ChunkDone) else self._noted_ns, error)

    def _add_done(self, done: Done) -> None:
        span, job = self._span, self._job
        queue = span.child("prefill.queue", job.arrived_ns)
        queue.add_ledger_call("acquire", job.admitting_ns, job.started_ns)
        queue.end(job.started_ns)
        computed_ns = job.started_ns + done.timings.prefill_ns
        span.add("prefill.compute", job.started_ns, computed_ns, {"looseleaf.chunks": self._num_chunks})
        if job.delivered_ns:
            span.add_ledger_call("hand_over", computed_ns, job.delivered_ns)
        span.set(
            {
                "looseleaf.cached_tokens": done.sources.cached,
                "looseleaf.computed_tokens": done.sources.computed,
                "looseleaf.branches": job.width,
            }
        )
