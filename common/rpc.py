"""gRPC at the edge of every service: server with health and reflection, channels, and errors as statuses.

One event loop, which never computes. UNKNOWN never leaves a service, nor an exception's text.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from common.errors import BY_GRPC_CODE, FieldViolation, Internal, LooseleafError, StartupError

MAX_MESSAGE_BYTES = 64 << 20
MAX_VIOLATIONS = 16
"""The status travels in the trailer, and gRPC drops a trailer of more than 8 KiB."""
SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.keepalive_permit_without_calls", 1),
]
CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.use_local_subchannel_pool", 1),
]
HEARTBEAT_S = 0.5
"""A worker's event loop sends something on every open stream at least so often: what a frozen process cannot."""
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
logger = logging.getLogger("rpc")


def status_of(error: LooseleafError) -> status_pb2.Status:
    """The google.rpc.Status of an error, with field violations and retry delay as details."""
    details: list[any_pb2.Any] = []
    if error.violations:
        violations = [
            error_details_pb2.BadRequest.FieldViolation(field=v.field[:100], description=v.description[:200])
            for v in error.violations[:MAX_VIOLATIONS]
        ]
        details.append(_packed(error_details_pb2.BadRequest(field_violations=violations)))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status_pb2.Status(code=code_pb2.Code.Value(error.grpc_code), message=error.message[:1000], details=details)


def _packed(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def error_of(error: grpc.RpcError) -> LooseleafError:
    """The LooseleafError that a failed call carried (the reverse of `status_of`)."""
    code: grpc.StatusCode = error.code()
    kind = BY_GRPC_CODE.get(code.name, Internal)
    violations: list[FieldViolation] = []
    retry_after_s: float | None = None
    status = _status_details(error)
    for detail in status.details if status is not None else ():
        bad_request = error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(bad_request):
            violations += [FieldViolation(v.field, v.description) for v in bad_request.field_violations]
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    return kind(error.details() or code.name, violations=tuple(violations), retry_after_s=retry_after_s)


def _status_details(error: grpc.RpcError) -> status_pb2.Status | None:
    metadata: Iterable[Any] = error.trailing_metadata() or ()
    for key, value in metadata:
        if key == "grpc-status-details-bin":
            return status_pb2.Status.FromString(value)
    return None


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """The only place where exceptions meet gRPC."""

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        if handler.request_streaming and handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(
                _guard_stream(handler.stream_stream), handler.request_deserializer, handler.response_serializer
            )
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                _guard_stream(handler.unary_stream), handler.request_deserializer, handler.response_serializer
            )
        if handler.request_streaming:
            return handler
        return grpc.unary_unary_rpc_method_handler(
            _guard_unary(handler.unary_unary), handler.request_deserializer, handler.response_serializer
        )


def _guard_unary(method: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Awaitable[Any]]:
    async def guarded(request: Any, context: Context) -> Any:
        try:
            result = method(request, context)
            return await result if asyncio.iscoroutine(result) else result
        except Exception as error:
            await _abort(context, error)

    return guarded


def _guard_stream(method: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    async def guarded(request: Any, context: Context) -> AsyncIterator[Any]:
        try:
            result = method(request, context)
            if asyncio.iscoroutine(result):  # a handler that writes to the context itself
                await result
                return
            async for response in result:
                yield response
        except Exception as error:
            await _abort(context, error)

    return guarded


async def _abort(context: Context, error: Exception) -> None:
    if isinstance(error, (grpc.aio.AbortError, grpc.aio.BaseError)):
        raise error
    if isinstance(error, grpc.RpcError):
        error = error_of(error)
    if not isinstance(error, LooseleafError):
        logger.error("unexpected failure in a handler", exc_info=error)
        error = Internal("the service failed; its log says why")
    await context.abort_with_status(rpc_status.to_status(status_of(error)))


class RpcServer:
    """A grpc.aio server with health (`Watch` included) and reflection. `port` is known after `bind`."""

    def __init__(self, host: str, port: int, *, reuse_port: bool = False) -> None:
        """`reuse_port`: others that say so too may listen on the same port, so that a successor can take over."""
        self._address = f"{host}:{port}"
        options = [*SERVER_OPTIONS, ("grpc.so_reuseport", int(reuse_port))]
        self._server = grpc.aio.server(options=options, interceptors=[ErrorInterceptor()])
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._names = [health.SERVICE_NAME, reflection.SERVICE_NAME]
        self.port = 0

    def add(self, add_to_server: Callable[[Any, Any], None], servicer: Any, service_name: str) -> None:
        """Register a servicer with its generated `add_XServicer_to_server` and full service name."""
        add_to_server(servicer, self._server)
        self._names.append(service_name)

    def bind(self) -> None:
        """Take the port. Raises StartupError when it is occupied; connections wait until `start`."""
        try:
            self.port = self._server.add_insecure_port(self._address)
        except RuntimeError:
            self.port = 0
        if self.port == 0:
            raise StartupError(f"cannot listen on {self._address}: the port is occupied or the address is not ours")

    async def start(self) -> None:
        """Serve; not yet ready. Binds first if `bind` was not called."""
        if self.port == 0:
            self.bind()
        reflection.enable_server_reflection(self._names, self._server)
        await self.set_ready(False)
        await self._server.start()

    async def set_ready(self, ready: bool) -> None:
        state = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ["", *self._names[2:]]:
            await self._health.set(name, state)

    async def stop(self, grace_s: float) -> None:
        """Tell health watchers, refuse new calls, give running ones `grace_s` seconds."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel whose frozen or vanished peer is noticed in about 5 s."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


async def wait_for_signal(failed: asyncio.Event) -> bool:
    """Return at SIGTERM or SIGINT (False), or when `failed` is set (True)."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    waits = [asyncio.ensure_future(event.wait()) for event in (stop, failed)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    return failed.is_set()


async def check_health(address: str, *, service: str = "", timeout_s: float = 2.0) -> bool:
    """Whether the health service at `address` says SERVING."""
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            reply = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.aio.AioRpcError:
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def reachable_address(host: str, port: int) -> str:
    """Where others reach a server bound to `host`: the host's own name where it listens on every interface."""
    return f"{socket.gethostname() if host in ('', '0.0.0.0', '::', '[::]') else host}:{port}"


def write_ready_file(path: str | None, lines: Sequence[str]) -> None:
    """Tell whoever started this process that it is ready, and where; atomic."""
    if path is None:
        return
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    os.replace(temporary, path)
