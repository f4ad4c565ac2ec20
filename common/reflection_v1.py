"""gRPC reflection under its final name, grpc.reflection.v1, which grpcio-reflection does not serve.

The messages of v1 and v1alpha are the same on the wire, so v1 uses v1alpha's servicer. Clients that request the
description of v1 get v1alpha's description under the new name.
"""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2

ALPHA, FINAL = "grpc.reflection.v1alpha", "grpc.reflection.v1"
SERVICE_NAME = f"{FINAL}.ServerReflection"


def add_reflection_v1(servicer: Any, server: grpc.aio.Server) -> None:
    """Registers v1alpha's asynchronous servicer under the name of v1."""
    _describe()
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handler = grpc.method_handlers_generic_handler(SERVICE_NAME, {"ServerReflectionInfo": method})
    server.add_generic_rpc_handlers((handler,))


def _describe() -> None:
    """Adds the description of v1 to the default pool, unless the pool already contains it."""
    pool = descriptor_pool.Default()  # type: ignore[no-untyped-call]
    try:
        pool.FindServiceByName(SERVICE_NAME)
        return
    except KeyError:
        pass
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    file.name = "grpc/reflection/v1/reflection.proto"
    file.package = FINAL
    file.ClearField("options")
    types = [field for message in _messages(file.message_type) for field in message.field]
    for field in (field for field in types if field.type_name):
        field.type_name = field.type_name.replace(f".{ALPHA}.", f".{FINAL}.")
    for method in file.service[0].method:
        method.input_type = method.input_type.replace(f".{ALPHA}.", f".{FINAL}.")
        method.output_type = method.output_type.replace(f".{ALPHA}.", f".{FINAL}.")
    pool.AddSerializedFile(file.SerializeToString())


def _messages(found: Any) -> list[Any]:
    return [*found, *(inner for message in found for inner in _messages(message.nested_type))]
