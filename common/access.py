"""The access policy of gRPC methods. A method is open either to all callers or to processes that have the deployment's
secret. The policy lists Looseleaf's own methods, and those of health and reflection. A method that is not listed is
internal. A server with a `Door` checks the secret before it reads the first message of an internal call.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from enum import Enum
from typing import Any

import grpc
import grpc.aio

from common.telemetry import Fallbacks

SECRET_HEADER = "looseleaf-secret"
logger = logging.getLogger("access")


class Access(Enum):
    """The kinds of callers that may use a method."""

    PUBLIC = "public"
    """All callers. The service itself may require an API key."""
    INTERNAL = "internal"
    """Callers that present the deployment's secret."""
    REFLECTION = "reflection"
    """All callers at the gateway; the same as INTERNAL at other services."""


POLICY: Mapping[str, Access] = {
    "/looseleaf.v1.InferenceService/Generate": Access.PUBLIC,
    "/looseleaf.v1.InferenceService/Embed": Access.PUBLIC,
    "/looseleaf.v1.InferenceService/Tokenize": Access.PUBLIC,
    "/looseleaf.v1.InferenceService/Detokenize": Access.PUBLIC,
    "/looseleaf.v1.InferenceService/ListModels": Access.PUBLIC,
    "/looseleaf.v1.InferenceService/Explain": Access.PUBLIC,
    "/grpc.health.v1.Health/Check": Access.PUBLIC,
    "/grpc.health.v1.Health/List": Access.PUBLIC,
    "/grpc.health.v1.Health/Watch": Access.PUBLIC,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Access.REFLECTION,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": Access.REFLECTION,
    "/looseleaf.v1.BlockStoreService/Attach": Access.INTERNAL,
    "/looseleaf.v1.BlockStoreService/Inspect": Access.INTERNAL,
    "/looseleaf.v1.BlockStoreService/ReadBlocks": Access.INTERNAL,
    "/looseleaf.v1.BlockStoreService/KeepTicket": Access.INTERNAL,
    "/looseleaf.v1.BlockStoreService/LocateBlocks": Access.INTERNAL,
    "/looseleaf.v1.BlockStoreService/Pull": Access.INTERNAL,
    "/looseleaf.v1.BlockStoreService/PullEarly": Access.INTERNAL,
    "/looseleaf.v1.BlockStoreService/Restore": Access.INTERNAL,
    "/looseleaf.v1.PrefillService/Prefill": Access.INTERNAL,
    "/looseleaf.v1.DecodeService/Session": Access.INTERNAL,
}


class Door(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """An interceptor for internal servers. It refuses calls without the secret, except calls of public methods."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        self.fallbacks = Fallbacks(logger)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        method = handler_call_details.method
        if POLICY.get(method) is Access.PUBLIC or self._knows_secret(handler_call_details.invocation_metadata):
            return await continuation(handler_call_details)
        self.fallbacks.note("internal call refused", f"{method[:100]!r} without the deployment's secret")
        return _REFUSAL

    def _knows_secret(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        given = next((value for key, value in metadata if key == SECRET_HEADER), "")
        return hmac.compare_digest(given.encode() if isinstance(given, str) else given, self._secret)


async def _refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    text = f"this call is internal: it needs the deployment's secret ({SECRET_HEADER} in its metadata)"
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, text)


# A stream_stream handler works for methods of every kind, and gRPC reads no message before the handler asks for one.
_REFUSAL: Any = grpc.stream_stream_rpc_method_handler(_refuse)
