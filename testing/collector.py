"""A collector of traces for tests. It is a real OTLP/gRPC server, which keeps the spans that it receives."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage


class Received(NamedTuple):
    """A span as the collector received it, with the name and the instance of its service."""

    service: str
    instance: str
    message: SpanMessage

    @property
    def name(self) -> str:
        return str(self.message.name)

    @property
    def trace_id(self) -> str:
        return self.message.trace_id.hex()

    @property
    def attributes(self) -> dict[str, Any]:
        return _values(self.message.attributes)

    @property
    def is_error(self) -> bool:
        return bool(self.message.status.code == self.message.status.STATUS_CODE_ERROR)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
    """A collector on loopback. It can be stopped and started again on the same port."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.port = 0
        self.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that make a service send its spans to this collector every 100 ms."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": self.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "100"}

    def Export(self, request: pb.ExportTraceServiceRequest, context: object) -> pb.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            about = _values(resource.resource.attributes)
            service, instance = about["service.name"], about.get("service.instance.id", "")
            for scope in resource.scope_spans:
                self.spans += [Received(service, instance, span) for span in scope.spans]
        return pb.ExportTraceServiceResponse()

    def trace(self, trace_id: str) -> list[Received]:
        """Returns the spans of one trace, in order of their start."""
        found = [span for span in list(self.spans) if span.trace_id == trace_id]
        return sorted(found, key=lambda span: int(span.message.start_time_unix_nano))

    def start(self) -> None:
        self._server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _values(attributes: Any) -> dict[str, Any]:
    return {item.key: _value(item.value) for item in attributes if isinstance(item, KeyValue)}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, str(kind))
