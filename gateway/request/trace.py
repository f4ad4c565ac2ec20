"""Records the spans of one request in the gateway: the request, its waits, and its attempts. The times of the spans
come from the request's explanation. Workers and block stores record spans of their own.
"""

from __future__ import annotations

from common.tracing import CURRENT, Attributes, Span, TraceContext, Tracer
from gateway.intake.resolved_request import ResolvedRequest
from gateway.request.delta import Summary
from gateway.request.explanation import MOST_ATTEMPTS, Explanation
from protos.v1 import inference_pb2 as pb

_OF_REQUEST = {
    pb.PHASE_KIND_INTAKE: "intake",
    pb.PHASE_KIND_GATE: "gate",
    pb.PHASE_KIND_RETRY: "retry",
    pb.PHASE_KIND_COME_BACK: "come_back",
    pb.PHASE_KIND_DELIVERY: "delivery",
}
"""The names of the spans of the gateway's phases that are not part of an attempt. Workers record spans of their own."""
_OF_ATTEMPT = {pb.PHASE_KIND_WORKER: "wait_for_worker"}


class RequestTrace:
    """The part of a request's trace that the gateway records. Until `end`, the calls that the current task makes to
    other services carry the context of the request's span or of the newest attempt's span.
    """

    def __init__(self, tracer: Tracer, request: ResolvedRequest, model: str, explanation: Explanation) -> None:
        """Begins the request's span, as a child of the caller's span if the caller has sent one."""
        self._request = request
        self._model = model if request.adapter is None else request.adapter.name
        self._explanation = explanation
        self._caller: TraceContext = CURRENT.get()
        self._root = tracer.begin(f"{request.operation} {self._model}", explanation.began_ns, self._caller)
        self._attempts: list[Span] = []
        CURRENT.set(self._root.context)

    def begin_attempt(self) -> None:
        """Begins the span of the explanation's newest attempt. Attempts beyond `MOST_ATTEMPTS` have no span."""
        if self._root.is_recording and len(self._attempts) < MOST_ATTEMPTS:
            self._attempts.append(self._root.child("attempt", self._explanation.from_ns))
            CURRENT.set(self._attempts[-1].context)

    def end_attempt(self, error: str = "") -> None:
        """Ends the newest attempt's span at the time at which the explanation's current phase began. `error` says why
        the attempt failed; it is empty if the attempt did not fail.
        """
        if self._attempts:
            self._attempts[-1].set(_attempt_attributes(len(self._attempts), self._explanation.attempt))
            self._attempts[-1].end(self._explanation.from_ns, error)

    def end(self, summary: Summary, finish_reasons: list[str], error: str) -> None:
        """Ends the request's span, and adds its waits. `error` is the name of the gRPC status with which the request
        failed, or empty.
        """
        CURRENT.set(self._caller)
        root = self._root
        if not root.is_recording:
            return
        self.end_attempt(error or "CANCELLED")  # no effect if the attempt has ended
        for phase in self._explanation.intervals():
            if (name := _OF_REQUEST.get(phase.kind)) is not None:
                root.add_wait(name, phase.start_ns, phase.end_ns)
            elif (name := _OF_ATTEMPT.get(phase.kind)) is not None and 0 < phase.attempt <= len(self._attempts):
                self._attempts[phase.attempt - 1].add_wait(name, phase.start_ns, phase.end_ns)
        if (first_ns := self._explanation.wrote_first_ns) is not None:
            root.event("first_token", first_ns)
        root.set(self._attributes(summary, finish_reasons))
        root.end(self._explanation.from_ns, error)

    def _attributes(self, summary: Summary, finish_reasons: list[str]) -> Attributes:
        """Returns the attributes of the request's span, most of them from OpenTelemetry's conventions for generative
        AI. They do not contain the prompt or the output.
        """
        request = self._request
        found: dict[str, str | int | float | bool | list[str]] = {
            "gen_ai.operation.name": request.operation,
            "gen_ai.provider.name": "looseleaf",
            "gen_ai.request.model": self._model,
            "gen_ai.response.id": request.request_id,
            "gen_ai.usage.input_tokens": summary.prompt_tokens,
            "gen_ai.usage.output_tokens": summary.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": summary.sources.cached,
            "looseleaf.attempts": summary.attempts,
        }
        if request.pooling is None:
            found |= {
                "gen_ai.request.max_tokens": request.stopping.max_tokens,
                "gen_ai.request.temperature": request.sampling.temperature,
                "gen_ai.request.top_p": request.sampling.top_p,
                "gen_ai.response.finish_reasons": finish_reasons,
            }
        if request.sampling.num_sequences > 1:
            found["gen_ai.request.choice.count"] = request.sampling.num_sequences
        return found


def _attempt_attributes(number: int, attempt: pb.AttemptExplanation) -> Attributes:
    found: dict[str, str | int] = {
        "looseleaf.attempt.number": number,
        "looseleaf.attempt.end": attempt.end,
        "looseleaf.attempt.output_tokens": attempt.output_tokens,
        "looseleaf.prefill.worker": attempt.prefill_worker,
    }
    if attempt.decode_worker:
        found |= {
            "looseleaf.decode.worker": attempt.decode_worker,
            "looseleaf.handed_over.tokens": attempt.handed_over_tokens,
            "looseleaf.handed_over.blocks": attempt.handed_over_blocks,
        }
    if attempt.sources.transferred_tokens:
        found["looseleaf.transferred.tokens"] = attempt.sources.transferred_tokens
    return found
