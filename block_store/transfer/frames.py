"""Encodes and decodes frames, which are `ReadBlocksResponse` messages, without protobuf's copies of the blocks.

protobuf copies a bytes field when it builds, serializes, parses and reads a message. Both ends therefore handle the
bytes of the message themselves. The wire format is that of `block_store.proto`, and any protobuf client can parse it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from protos.v1 import block_store_pb2 as pb
from protos.v1 import block_store_pb2_grpc

SERVICE = "looseleaf.v1.BlockStoreService"
METHOD = f"/{SERVICE}/ReadBlocks"
_FIELDS = pb.ReadBlocksResponse.DESCRIPTOR.fields_by_name
_VARINT, _BYTES = 0, 2  # wire types
_INDEX = _FIELDS["index"].number << 3 | _VARINT
_DATA = _FIELDS["data"].number << 3 | _BYTES
_DIGESTS = _FIELDS["digests"].number << 3 | _BYTES
_DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True)
class Frame:
    """The content of consecutive blocks of a request's table."""

    index: int
    """Position of the first block in the table."""
    data: memoryview
    """The bytes of all blocks, one after another: a view of the received message."""
    digests: Sequence[int]


def encode(index: int, blocks: Sequence[bytes | memoryview], digests: Sequence[int]) -> bytes:
    """Returns the serialized message. Copies the blocks once, with the interpreter lock held."""
    head = pb.ReadBlocksResponse(index=index, digests=digests).SerializeToString()
    size = sum(map(len, blocks))
    return b"".join([head, bytes([_DATA]), _varint(size), *blocks])


def decode(message: bytes) -> Frame:
    """Returns the frame in a serialized message, without a copy of the blocks. Raises ValueError if the message does
    not contain a valid frame.
    """
    index, data, digests = 0, memoryview(b""), memoryview(b"")
    for tag, value in _fields(memoryview(message)):
        if tag == _INDEX and isinstance(value, int):
            index = value
        elif tag == _DATA and isinstance(value, memoryview):
            data = value
        elif tag == _DIGESTS and isinstance(value, memoryview) and len(value) % _DIGEST_BYTES == 0:
            digests = value
        else:
            raise ValueError(f"a frame has no field with the tag {tag}")
    starts = range(0, len(digests), _DIGEST_BYTES)
    return Frame(index, data, [int.from_bytes(digests[at : at + _DIGEST_BYTES], "little") for at in starts])


def add_to_server(servicer: Any, server: Any) -> None:
    """Registers the service so that its `ReadBlocks` yields serialized messages. gRPC uses the first generic handler of
    a method and the last registered one, so this handler is registered as both.
    """
    read: Any = grpc.unary_stream_rpc_method_handler(
        servicer.ReadBlocks, request_deserializer=pb.ReadBlocksRequest.FromString, response_serializer=None
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"ReadBlocks": read}),))
    block_store_pb2_grpc.add_BlockStoreServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    server.add_registered_method_handlers(SERVICE, {"ReadBlocks": read})


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    at = 0
    while at < len(message):
        tag, at = _read_varint(message, at)
        value, at = _read_varint(message, at)
        if tag & 7 == _VARINT:
            yield tag, value
        elif tag & 7 == _BYTES and at + value <= len(message):
            yield tag, message[at : at + value]
            at += value
        else:
            raise ValueError(f"a frame of {len(message)} bytes has a damaged field at byte {at}")


def _read_varint(message: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for number, byte in enumerate(message[at : at + 10]):
        value |= (byte & 0x7F) << 7 * number
        if byte < 0x80:
            return value, at + number + 1
    raise ValueError(f"a frame of {len(message)} bytes has no number at byte {at}")


def _varint(value: int) -> bytes:
    groups = []
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])
