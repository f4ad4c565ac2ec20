"""Traces of requests. A trace is a tree of spans, which OpenTelemetry's protocol (OTLP) carries to a collector.

Traces are off unless OpenTelemetry's standard variables name a collector. If they are on, `common.otlp` records them.
This module imports nothing from OpenTelemetry. Times are values of `time.monotonic_ns`, which may have been recorded
before the span is created.

A trace continues from process to process through the W3C headers `traceparent` and `tracestate`
(https://www.w3.org/TR/trace-context/), over HTTP, in gRPC metadata and in `decode_pb2.Submit`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

from common.errors import StartupError

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
MAX_STATE_CHARS = 512
"""Length of a `tracestate` that W3C asks every system to pass on. Looseleaf drops a longer one."""
SHORTEST_WAIT_NS = 1_000_000
"""A shorter wait has no span. A span takes about 0.06 ms of CPU time."""
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_STATE = re.compile(r"[ -~]*")
Kind = Literal["internal", "server", "client"]
Value = str | int | float | bool | Sequence[str]
Attributes = Mapping[str, Value]
NO_ATTRIBUTES: Attributes = {}


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The identity of a span in W3C's form, with which another process can add children to the span. Empty fields mean
    no span.
    """

    traceparent: str = ""
    tracestate: str = ""

    @classmethod
    def of(cls, traceparent: str, tracestate: str = "") -> TraceContext:
        """Returns a caller's context, or `NO_CONTEXT` if `traceparent` is invalid. Drops an invalid `tracestate`."""
        if not _PARENT.fullmatch(traceparent):
            return NO_CONTEXT
        is_state = len(tracestate) <= MAX_STATE_CHARS and _STATE.fullmatch(tracestate)
        return cls(traceparent, tracestate if is_state else "")

    @classmethod
    def of_headers(cls, headers: Iterable[tuple[str | bytes, str | bytes]]) -> TraceContext:
        """Returns the context in HTTP headers or in gRPC metadata, whose names are in lower case."""
        found = {_text(name): value for name, value in headers if name in _NAMES}
        return cls.of(_text(found.get(TRACEPARENT, "")), _text(found.get(TRACESTATE, ""))) if found else NO_CONTEXT

    @property
    def trace_id(self) -> str:
        """The trace's id in hex, or "" if there is no trace."""
        return self.traceparent[3:35]

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The context as gRPC metadata."""
        pairs = ((TRACEPARENT, self.traceparent), (TRACESTATE, self.tracestate))
        return tuple(pair for pair in pairs if pair[1])


_NAMES = {TRACEPARENT, TRACESTATE, TRACEPARENT.encode(), TRACESTATE.encode()}
NO_CONTEXT = TraceContext()
CURRENT: ContextVar[TraceContext] = ContextVar("trace", default=NO_CONTEXT)
"""The context of the span that the current task works for. It is the caller's span until a span of this process
replaces it. JSON log lines show the trace's id.
"""


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")


class Span:
    """A part of a trace. This class records nothing."""

    is_recording = False

    @property
    def context(self) -> TraceContext:
        """The context for children in other processes."""
        return CURRENT.get()

    def child(self, name: str, start_ns: int, *, kind: Kind = "internal") -> Span:
        """Begins a child. Parent and child may end in any order."""
        return self

    def add(
        self, name: str, start_ns: int, end_ns: int, attributes: Attributes = NO_ATTRIBUTES, *, kind: Kind = "internal"
    ) -> None:
        """Adds a child that has ended."""

    def add_wait(self, name: str, start_ns: int, end_ns: int) -> None:
        """Adds a child for a wait, unless the wait was short."""
        if end_ns - start_ns >= SHORTEST_WAIT_NS:
            self.add(name, start_ns, end_ns)

    def add_ledger_call(self, name: str, start_ns: int, end_ns: int) -> None:
        """Adds a child for a call to the ledger that has ended."""
        self.add(f"ledger.{name}", start_ns, end_ns, {"db.system.name": "redis"}, kind="client")

    def event(self, name: str, at_ns: int, attributes: Attributes = NO_ATTRIBUTES) -> None:
        """Adds an event, which has a time but no duration."""

    def set(self, attributes: Attributes) -> None:
        """Adds attributes, unless the span has ended."""

    def end(self, end_ns: int, error: str = "") -> None:
        """Ends the span, with an error if `error` is not empty. A second call has no effect."""


class Tracer:
    """The source of a service's spans. This class records nothing."""

    is_enabled = False

    def begin(self, name: str, start_ns: int, parent: TraceContext, *, kind: Kind = "server") -> Span:
        """Begins a child of a span of another process, or a new trace if `parent` is `NO_CONTEXT`. The configured
        sampler decides whether the span is recorded. The default sampler records it unless the parent is not recorded.
        """
        return NO_SPAN

    def close(self) -> None:
        """Exports the remaining spans, and waits for about two seconds at most."""


NO_SPAN = Span()
NO_TRACER = Tracer()


@contextmanager
def traced(tracer: Tracer, name: str) -> Iterator[Span]:
    """A context manager that yields the span of a call that this process answers. Calls that the body makes carry the
    span's context. If the body raises, the span ends with the name of the exception's status or class.
    """
    caller, error = CURRENT.get(), ""
    span = tracer.begin(name, time.monotonic_ns(), caller)
    CURRENT.set(span.context)
    try:
        yield span
    except BaseException as failure:
        error = str(getattr(failure, "grpc_code", type(failure).__name__))
        raise
    finally:
        CURRENT.set(caller)
        span.end(time.monotonic_ns(), error)


def is_wanted(environment: Mapping[str, str]) -> bool:
    """Returns whether OpenTelemetry's variables set an endpoint, and do not turn traces off."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporters = environment.get("OTEL_TRACES_EXPORTER", "otlp").split(",")
    return "otlp" in (name.strip() for name in exporters) and any(environment.get(name) for name in ENDPOINTS)


def tracer_of(service: str, instance: str = "") -> Tracer:
    """Returns the tracer of a service, such as "gateway". `instance` is a name that distinguishes this process from
    others of the same service.

    Raises StartupError if the environment asks for traces, but the packages are missing or a variable is invalid
    (`common.otlp.otlp_tracer`).
    """
    if not is_wanted(os.environ):
        return NO_TRACER
    try:
        from common.otlp import otlp_tracer  # needs an optional package
    except ImportError as error:
        name = next(name for name in ENDPOINTS if os.environ.get(name))
        raise StartupError(f"{name} asks for traces, but {error}; pip install 'looseleaf[traces]'") from None
    return otlp_tracer(service, instance)
