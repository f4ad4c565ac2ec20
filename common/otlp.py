"""Records traces with OpenTelemetry's SDK, and exports them over OTLP. Only `common.tracing` imports this module, and
only if traces are on.

Spans wait in a bounded queue of the SDK, from which a separate thread exports them. Requests do not wait for the
export. If the queue is full or an export fails, spans are dropped and counted. OpenTelemetry's environment variables
configure the sampler, the queue and the exporter.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from common.errors import StartupError
from common.telemetry import count_fallbacks_of
from common.tracing import ENDPOINTS, NO_ATTRIBUTES, Attributes, Kind, Span, TraceContext, Tracer
from common.version import VERSION

logger = logging.getLogger("traces")
CLOSE_S = 2.0
DEFAULT_QUEUE = 2048
"""The default of OpenTelemetry's SDK for OTEL_BSP_MAX_QUEUE_SIZE."""
_QUEUE_SIZE = "OTEL_BSP_MAX_QUEUE_SIZE"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_NOISY = ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal")
"""Loggers that report each failed export. They are silenced, because `CountingExporter` reports an outage once."""
_KINDS = {
    "internal": trace.SpanKind.INTERNAL,
    "server": trace.SpanKind.SERVER,
    "client": trace.SpanKind.CLIENT,
}
_W3C = TraceContextTextMapPropagator()


class CountingExporter(SpanExporter):
    """An exporter that counts the spans that are lost, and logs the beginning and the end of an outage."""

    def __init__(self, inner: SpanExporter, endpoint: str, queue_size: int) -> None:
        self._inner = inner
        self._endpoint = endpoint
        self._queue_size = queue_size
        self._num_taken = 0
        """Number of spans that have left the queue to be exported. Only the exporting thread changes this number."""
        self._num_exported = 0
        self._num_failed = 0
        self._num_ended = 0
        """Number of spans that have entered the queue. Only the thread in which spans end changes this number."""
        self._num_pushed_out = 0
        self._is_down = False
        self._is_closed = False

    @property
    def num_dropped(self) -> int:
        """Number of spans that were lost because the queue was full or their export failed."""
        return min(self._num_failed + self._num_pushed_out, self._num_ended - self._num_exported)

    def count_ended(self) -> None:
        """Counts a span that enters the queue, and the one that it pushes out if the queue is full. Spans that are on
        their way from the queue to `export` still count as queued, so `num_dropped` can be too large for a moment.
        """
        self._num_ended += 1
        if self._num_ended - self._num_taken - self._num_pushed_out > self._queue_size:
            self._num_pushed_out += 1

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._num_taken += len(spans)
        result = self._inner.export(spans)
        if result is SpanExportResult.SUCCESS:
            if self._is_down:
                logger.info("traces are exported to %s again; %d spans were dropped", self._endpoint, self.num_dropped)
            self._is_down = False
            self._num_exported += len(spans)
            return result
        self._num_failed += len(spans)
        if not self._is_down:
            self._is_down = True
            logger.warning("the collector at %s does not accept traces: spans are dropped and counted", self._endpoint)
        return result

    def shutdown(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._inner.shutdown()


class CountedProcessor(BatchSpanProcessor):
    """OpenTelemetry's processor with a queue of spans, extended to count the spans that enter the queue. All spans must
    end in the same thread, because the counters have no lock.
    """

    def __init__(self, exporter: CountingExporter, queue_size: int) -> None:
        super().__init__(exporter, max_queue_size=queue_size)
        self._counts = exporter

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled:
            self._counts.count_ended()
        super().on_end(span)


class OtlpSpan(Span):
    """A span of OpenTelemetry's SDK. The same offset converts its times and those of its children to Unix time."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span, unix_ns: int) -> None:
        """`unix_ns` is the Unix time at which `time.monotonic_ns` was 0."""
        self._tracer = tracer
        self._span = span
        self._unix_ns = unix_ns
        self._context = trace.set_span_in_context(span, Context())
        self.is_recording = span.is_recording()

    @property
    def context(self) -> TraceContext:
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, self._context)
        return TraceContext(carrier.get("traceparent", ""), carrier.get("tracestate", ""))

    def child(self, name: str, start_ns: int, *, kind: Kind = "internal") -> Span:
        started = self._tracer.start_span(name, self._context, _KINDS[kind], start_time=start_ns + self._unix_ns)
        return OtlpSpan(self._tracer, started, self._unix_ns)

    def add(
        self, name: str, start_ns: int, end_ns: int, attributes: Attributes = NO_ATTRIBUTES, *, kind: Kind = "internal"
    ) -> None:
        if self.is_recording:
            start = start_ns + self._unix_ns
            span = self._tracer.start_span(name, self._context, _KINDS[kind], dict(attributes), start_time=start)
            span.end(end_ns + self._unix_ns)

    def event(self, name: str, at_ns: int, attributes: Attributes = NO_ATTRIBUTES) -> None:
        self._span.add_event(name, dict(attributes), at_ns + self._unix_ns)

    def set(self, attributes: Attributes) -> None:
        if self._span.is_recording():
            self._span.set_attributes(dict(attributes))

    def end(self, end_ns: int, error: str = "") -> None:
        if not self._span.is_recording():  # not sampled, or ended
            return
        if error:
            self._span.set_attribute("error.type", error)
            self._span.set_status(trace.StatusCode.ERROR, error)
        self._span.end(end_ns + self._unix_ns)


class OtlpTracer(Tracer):
    """A tracer that records spans with OpenTelemetry's SDK."""

    is_enabled = True

    def __init__(self, provider: TracerProvider, processor: BatchSpanProcessor, exporter: CountingExporter) -> None:
        provider.add_span_processor(processor)
        self._processor = processor
        self._exporter = exporter
        self._tracer = provider.get_tracer("looseleaf", VERSION)

    @property
    def num_dropped(self) -> int:
        """Number of spans that were lost because the queue was full or their export failed."""
        return self._exporter.num_dropped

    def begin(self, name: str, start_ns: int, parent: TraceContext, *, kind: Kind = "server") -> Span:
        unix_ns = time.time_ns() - time.monotonic_ns()
        context = _W3C.extract(dict(parent.metadata), Context())
        started = self._tracer.start_span(name, context, _KINDS[kind], start_time=start_ns + unix_ns)
        return OtlpSpan(self._tracer, started, unix_ns)

    def close(self) -> None:
        timer = threading.Timer(CLOSE_S, self._exporter.shutdown)  # which ends the export that `shutdown` waits for
        timer.daemon = True
        timer.start()
        self._processor.shutdown()  # type: ignore[no-untyped-call]
        timer.cancel()


def otlp_tracer(service: str, instance: str) -> OtlpTracer:
    """Returns a tracer for the collector that OpenTelemetry's variables name. Raises StartupError if the protocol is
    unknown, if the size of the queue is invalid, or if another variable causes a ValueError.
    """
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    queue_size = _queue_size()
    try:
        exporter = CountingExporter(_exporter(), _first(ENDPOINTS)[1], queue_size)
        processor = CountedProcessor(exporter, queue_size)
    except ValueError as error:
        raise StartupError(f"traces: {error}") from None
    count_fallbacks_of(lambda: {"spans_dropped": count} if (count := exporter.num_dropped) else {})
    provider = TracerProvider(resource=_resource(service, instance), shutdown_on_exit=False)
    return OtlpTracer(provider, processor, exporter)


def _queue_size() -> int:
    given = os.environ.get(_QUEUE_SIZE) or str(DEFAULT_QUEUE)
    if not given.strip().isdecimal() or not int(given):
        raise StartupError(f"traces: {_QUEUE_SIZE} must be an integer of at least 1, got {given[:40]!r}")
    return int(given)


def _exporter() -> SpanExporter:
    """Returns the exporter of the configured protocol, which is gRPC by default. Raises ValueError for an unknown
    protocol.
    """
    name, protocol = _first(_PROTOCOLS)
    if protocol in ("", "grpc"):
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter()
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter()
    raise ValueError(f"{name} is {protocol!r}; it must be 'grpc' or 'http/protobuf'")


def _resource(service: str, instance: str) -> Resource:
    """Returns the description of this process, which OTEL_RESOURCE_ATTRIBUTES extends."""
    own = {SERVICE_VERSION: VERSION, "looseleaf.service": service}
    if instance:
        own[SERVICE_INSTANCE_ID] = instance
    found = Resource.create(own)
    if not str(found.attributes[SERVICE_NAME]).startswith("unknown_service"):  # it was given
        return found
    return found.merge(Resource({SERVICE_NAME: f"looseleaf-{service}"}))


def _first(names: Sequence[str]) -> tuple[str, str]:
    """Returns the name and the value of the first of these variables that is not empty, or two empty strings."""
    return next(((name, value) for name in names if (value := os.environ.get(name, "").strip())), ("", ""))
