"""The spans of a group on a decode worker. They are created in the event loop when the group has left the worker, from
times that the step thread noted.

decode                     from the submit until the group left the worker
  ledger.claim             until the ledger had moved the ticket's references to this worker
  decode.queue             until the group started, unless this wait was short
  decode.run               all steps, with their number; swaps are events
"""

from __future__ import annotations

from common.tracing import Span, Tracer
from decode_svc.history import History
from decode_svc.scheduler import Group


def trace_group(tracer: Tracer, group: Group) -> None:
    """Adds the spans of a group that has left the worker, below the span of the gateway."""
    history = group.history
    span = tracer.begin("decode", group.arrived_ns, group.trace)
    if not span.is_recording:
        return
    span.set({"looseleaf.sequences": len(group.sequences)})
    span.add_ledger_call("claim", group.arrived_ns, group.claimed_ns or history.left_ns)
    if group.claimed_ns:
        started_ns = history.left_ns if history.started_ns is None else history.started_ns
        span.add_wait("decode.queue", group.claimed_ns, started_ns)
    if history.started_ns is not None:
        _end_run(span.child("decode.run", history.started_ns), history)
    span.end(history.left_ns, history.rejection)


def _end_run(run: Span, history: History) -> None:
    run.set({"looseleaf.steps": history.num_steps, "looseleaf.copied_blocks": history.copied_blocks})
    for swap in history.swaps:
        run.event("swapped_out", swap.start_ns, {"looseleaf.blocks": swap.blocks_out})
        if swap.end_ns is not None:
            run.event("swapped_in", swap.end_ns, {"looseleaf.blocks": swap.blocks_in})
    run.end(history.left_ns)
