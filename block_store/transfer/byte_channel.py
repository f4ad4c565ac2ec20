"""The byte channel, a TCP or TLS connection over which blocks are copied from one arena's memory into another's.

gRPC copies every byte several times. On this channel without TLS, the sender's system call reads from an arena in host
memory, and the receiver's writes into the arena. `KeepTicket` tells the receiver the port. The two ends of a connection
send:

    server: nonce[16]
    client: HMAC-SHA256(the deployment's secret, nonce)[32]
    client: size u32, ReadBlocksRequest          (any number of requests, one after another)
    server: FRAME u8, index u32, count u32, digests u64[count], the blocks' bytes, OK u8      (for each frame)
    server: END u8

A frame counts only once its OK has arrived. The server sends OK after it has compared the generations again and, if the
ledger found the blocks in the ticket earlier, has confirmed the ticket. It sends OK together with what follows. Instead
of FRAME, OK or END, the server may send a refusal (STALE, NOT_HELD or UNAVAILABLE), which ends the connection. Without
TLS, a system call sends or receives many blocks.
"""

from __future__ import annotations

import hmac
import itertools
import socket
import ssl
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from enum import IntEnum

NONCE_BYTES = 16
PROOF_BYTES = 32
SIZE = struct.Struct("<I")
FRAME_HEAD = struct.Struct("<II")
"""Index of the first block in the request's table, and the number of blocks."""
MAX_REQUEST_BYTES = 16 << 20
STALL_S = 4.0
"""Time in seconds without progress, during a request, after which either end closes the connection."""
MAX_PIECES = 256
"""Maximum number of pieces that one system call sends or fills. The limit of Linux is 1,024."""
READ_AHEAD = 4096
"""Number of bytes that a receiver reads ahead. They are copied once more if they belong to blocks."""
_CLOSED = "the other end closed the connection"
Buffer = bytes | memoryview


class Mark(IntEnum):
    """A byte that the server sends before, after or instead of a frame."""

    FRAME = 1
    OK = 2
    END = 3
    STALE = 4
    """A block was reallocated or is not sealed, or the ticket has ended."""
    NOT_HELD = 5
    """The ticket does not hold a block, the request is invalid, or the server cannot send blocks of that arena."""
    UNAVAILABLE = 6
    """The server's ledger cannot be used."""


def proof(secret: str | None, nonce: bytes) -> bytes:
    """Returns a client's answer to a nonce, 32 bytes."""
    return hmac.digest((secret or "").encode(), nonce, "sha256")


def prepare(connection: socket.socket) -> None:
    """Sets the timeout and the TCP options of a connection."""
    connection.settimeout(STALL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def send(connection: socket.socket, pieces: Iterable[Buffer]) -> None:
    """Sends all pieces. Unlike `sendall`, it raises TimeoutError only if nothing is sent for the socket's timeout."""
    left = _Left(pieces)
    while left.pieces:
        left.skip(_send_some(connection, left.first()))


class Receiver:
    """The receiving side of one end. It reads up to READ_AHEAD bytes ahead, so that the small parts of a message take
    one system call. Its methods raise ConnectionError if the other end closes the connection first, and TimeoutError if
    nothing arrives for the socket's timeout.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._ahead = memoryview(b"")

    def take(self, num_bytes: int) -> bytes:
        """Returns the next `num_bytes` bytes."""
        if num_bytes > READ_AHEAD:
            self.fill(memoryview(whole := bytearray(num_bytes)))
            return bytes(whole)
        while len(self._ahead) < num_bytes:
            if not (more := self._connection.recv(READ_AHEAD)):
                raise ConnectionResetError(_CLOSED)
            self._ahead = memoryview(bytes(self._ahead) + more)
        taken, self._ahead = bytes(self._ahead[:num_bytes]), self._ahead[num_bytes:]
        return taken

    def fill(self, *buffers: memoryview) -> None:
        """Fills the buffers with the next bytes."""
        left = _Left(buffers)
        while left.pieces and self._ahead:
            num_bytes = min(len(left.pieces[0]), len(self._ahead))
            left.pieces[0][:num_bytes] = self._ahead[:num_bytes]
            self._ahead = self._ahead[num_bytes:]
            left.skip(num_bytes)
        while left.pieces:
            if (num_bytes := _receive_some(self._connection, left.first())) == 0:
                raise ConnectionResetError(_CLOSED)
            left.skip(num_bytes)


def _send_some(connection: socket.socket, pieces: Sequence[memoryview]) -> int:
    if isinstance(connection, ssl.SSLSocket):  # TLS takes one buffer at a time
        return connection.send(pieces[0])
    return connection.sendmsg(pieces)


def _receive_some(connection: socket.socket, pieces: Sequence[memoryview]) -> int:
    if isinstance(connection, ssl.SSLSocket):
        return connection.recv_into(pieces[0])
    return connection.recvmsg_into(pieces)[0]


class _Left:
    """The pieces that are still to be sent or filled."""

    def __init__(self, pieces: Iterable[Buffer]) -> None:
        self.pieces = deque(memoryview(piece) for piece in pieces if len(piece))

    def first(self) -> list[memoryview]:
        """Returns the pieces of the next system call."""
        return list(itertools.islice(self.pieces, MAX_PIECES))

    def skip(self, num_bytes: int) -> None:
        """Removes the first `num_bytes` bytes."""
        while num_bytes and num_bytes >= len(self.pieces[0]):
            num_bytes -= len(self.pieces.popleft())
        if num_bytes:
            self.pieces[0] = self.pieces[0][num_bytes:]
