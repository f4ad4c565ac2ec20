"""The messages between a worker's first rank and the others. A message is a header of three 64-bit numbers (kind, key,
bytes of the body), possibly with a file descriptor, and a body. A body is empty, JSON or arrays.
"""

from __future__ import annotations

import enum
import json
import socket
import struct
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import RankLost
from engine.step import StepInput

_HEADER = struct.Struct("<QQQ")


class Kind(enum.IntEnum):
    """The kind of a message."""

    SETTINGS = 1
    """Tells the receiver to load the model with these settings (JSON)."""
    LOADED = 2
    """Answers SETTINGS with a `Loaded` (JSON)."""
    ARENA = 3
    """Tells the receiver to bind the arena that a `SharedBlocks` (JSON) describes."""
    GUARD = 4
    """Tells the receiver to keep a file open, which is the lock of a writer slot. The file replaces the last file with
    the same key.
    """
    STEP = 5
    """Tells the receiver to compute this step (`pack`). The key is 1 for logits, or 0 for hidden states."""


@dataclass(frozen=True, slots=True)
class Message:
    kind: Kind
    key: int
    body: bytearray
    fds: tuple[int, ...]

    @property
    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found


@dataclass(frozen=True, slots=True)
class SharedBlocks:
    """The location of an arena's blocks, uint8 [num_blocks, block_bytes], in a file that every rank can map."""

    path: str
    offset: int
    num_blocks: int
    block_bytes: int

    def map(self) -> npt.NDArray[np.uint8]:
        return np.memmap(self.path, np.uint8, "r+", self.offset, (self.num_blocks, self.block_bytes))


@dataclass(frozen=True, slots=True)
class Loaded:
    """A rank's message after it has loaded its share of the model or has failed to load it (`error`)."""

    weights_bytes: int = 0
    numerics: str = ""
    model_fingerprint: str = ""
    error: str = ""


def send_json(to: socket.socket, kind: Kind, value: Any) -> None:
    """Sends `value`, a dict or a dataclass, as JSON."""
    send(to, kind, json.dumps(value if isinstance(value, dict) else asdict(value)).encode())


def send(to: socket.socket, kind: Kind, body: bytes = b"", *, key: int = 0, fd: int | None = None) -> None:
    """Sends one message. Raises OSError if the receiver is gone."""
    header = _HEADER.pack(kind, key, len(body))
    if fd is None:
        to.sendall(header + body)
    else:
        socket.send_fds(to, [header], [fd])
        to.sendall(body)


def receive(of: socket.socket) -> Message:
    """Waits for a message. Raises RankLost if the sender has closed the connection."""
    header, fds, _, _ = socket.recv_fds(of, _HEADER.size, 1)
    if not header:
        raise RankLost("the connection was closed")
    header += bytes(receive_exactly(of, _HEADER.size - len(header)))
    kind, key, size = _HEADER.unpack(header)
    return Message(Kind(kind), key, receive_exactly(of, size), tuple(fds))


def receive_exactly(of: socket.socket, size: int) -> bytearray:
    """Returns the next `size` bytes. Raises RankLost if the sender has closed the connection."""
    body = bytearray(size)
    receive_into(of, memoryview(body))
    return body


def receive_into(of: socket.socket, rest: memoryview) -> None:
    """Fills `rest` with the next bytes. Raises RankLost if the sender has closed the connection."""
    while rest:
        if not (count := of.recv_into(rest)):
            raise RankLost("the connection was closed")
        rest = rest[count:]


def pack(batch: StepInput) -> bytes:
    """Returns the arrays of a step end to end, 64-bit arrays first. `unpack` is the inverse. The first numbers are T,
    B, R, the number of KV groups, and the width of each group's block table. Adapters are omitted, because they are not
    supported with several ranks.
    """
    widths = [table.shape[1] for table in batch.block_tables]
    sizes = [len(batch.token_ids), len(batch.context_lens), len(batch.logits_rows), len(widths), *widths]
    wide = (np.array(sizes, np.int64), batch.token_ids, batch.positions, batch.logits_rows, *batch.slot_mappings)
    narrow = (batch.cu_seqlens_q, batch.context_lens, *batch.block_tables)
    return b"".join([array.tobytes() for array in (*wide, *narrow)])


def unpack(body: bytearray) -> StepInput:
    """Returns a step whose arrays are views of `body`."""
    at = 0

    def take(dtype: type[np.int64 | np.int32], *shape: int) -> npt.NDArray[Any]:
        nonlocal at
        found = np.frombuffer(body, dtype, int(np.prod(shape)), at)
        at += found.nbytes
        return found.reshape(shape)

    tokens, sequences, rows, groups = map(int, take(np.int64, 4))
    widths = [int(width) for width in take(np.int64, groups)]
    token_ids, positions, logits_rows = take(np.int64, tokens), take(np.int64, tokens), take(np.int64, rows)
    slots = tuple(take(np.int64, tokens) for _ in range(groups))
    starts, lens = take(np.int32, sequences + 1), take(np.int32, sequences)
    tables = tuple(take(np.int32, sequences, width) for width in widths)
    return StepInput(token_ids, positions, slots, starts, lens, tables, logits_rows)
