"""The sending side of byte channels, with a listening socket and one thread for each connection."""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from google.protobuf.message import DecodeError

from block_store.errors import BlockStoreError, Gone, NotHolder, Stale
from block_store.transfer.block_source import BlockSource
from block_store.transfer.byte_channel import (
    FRAME_HEAD,
    MAX_REQUEST_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    SIZE,
    STALL_S,
    Mark,
    Receiver,
    prepare,
    proof,
    send,
)
from common import convert
from common.certificates import Changed
from common.errors import LooseleafError, StartupError
from common.telemetry import Fallbacks
from common.ticket import TicketId
from common.trust import Trust
from common.types import Epoch
from protos.v1 import block_store_pb2 as pb

logger = logging.getLogger("byte-server")
MAX_CONNECTIONS = 64
"""Maximum number of open connections. Further connections are closed at once, and their clients use gRPC."""
IDLE_S = 60.0
"""Time in seconds after which a connection without requests is closed."""
PAUSE_S = 0.5
"""Pause in seconds after a connection that could not be accepted, for example because too many files are open."""


class ByteServer:
    """The server of one store's byte channels. `source_of` returns a reader of the blocks of an arena, or raises a
    LooseleafError.
    """

    def __init__(self, host: str, port: int, trust: Trust, source_of: Callable[[str], BlockSource]) -> None:
        """Creates a server that does not listen yet. Port 0 means any free port."""
        self._host, self._port = host, port
        self._trust = trust
        self._source_of = source_of
        self._tls = None if trust.certificates is None else trust.certificates.server_context()
        self._certificates_changed = None if trust.certificates is None else Changed(trust.certificates)
        self._places = threading.Semaphore(MAX_CONNECTIONS)
        self._listener: socket.socket | None = None
        self._closed = threading.Event()
        self.fallbacks = Fallbacks(logger)

    def listen(self) -> int:
        """Returns the port. The first call begins to listen, so that a store that no other host reads has no open port.
        Only one thread may call this method. Raises StartupError if it cannot listen on the port, for example because
        the port is occupied.
        """
        if self._listener is None:
            host, family = self._host.strip("[]"), socket.AF_INET6 if ":" in self._host else socket.AF_INET
            try:
                self._listener = socket.create_server((host, self._port), family=family, backlog=MAX_CONNECTIONS)
            except OSError as error:
                reason = f"cannot listen for byte channels on {self._host}:{self._port}: {error.strerror}"
                raise StartupError(reason) from error
            self._port = self._listener.getsockname()[1]
            threading.Thread(target=self._accept, args=(self._listener,), name="byte-server", daemon=True).start()
        return self._port

    def close(self) -> None:
        """Accepts no more connections. Open connections end with the process."""
        self._closed.set()
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed.is_set():
            try:
                self._begin(listener.accept()[0])
            except (OSError, RuntimeError) as error:
                if not self._closed.is_set():
                    self.fallbacks.note("byte channel not accepted", str(error))
                    self._closed.wait(PAUSE_S)

    def _begin(self, connection: socket.socket) -> None:
        """Starts the thread of a connection. Raises RuntimeError if no thread can be started."""
        if not self._places.acquire(blocking=False):
            connection.close()
            return
        try:
            threading.Thread(target=self._run, args=(connection,), name="byte-channel", daemon=True).start()
        except RuntimeError:
            connection.close()
            self._places.release()
            raise

    def _run(self, connection: socket.socket) -> None:
        try:
            prepare(connection)
            with self._secured(connection) as secured:
                receiver = Receiver(secured)
                if self._knows_secret(secured, receiver):
                    while self._serve(secured, receiver):
                        continue
        except (OSError, DecodeError) as error:
            logger.debug("a byte channel ended: %s", error)
        except Exception:
            logger.exception("a byte channel failed")
        finally:
            connection.close()
            self._places.release()

    def _secured(self, connection: socket.socket) -> socket.socket:
        if self._tls is None or self._trust.certificates is None or self._certificates_changed is None:
            return connection
        if self._certificates_changed():
            self._tls = self._trust.certificates.server_context()
        return self._tls.wrap_socket(connection, server_side=True)

    def _knows_secret(self, connection: socket.socket, receiver: Receiver) -> bool:
        nonce = secrets.token_bytes(NONCE_BYTES)
        send(connection, [nonce])
        return hmac.compare_digest(receiver.take(PROOF_BYTES), proof(self._trust.secret, nonce))

    def _serve(self, connection: socket.socket, receiver: Receiver) -> bool:
        """Answers one request. Returns whether the connection can be used for another request."""
        connection.settimeout(IDLE_S)
        (size,) = SIZE.unpack(receiver.take(SIZE.size))
        connection.settimeout(STALL_S)
        if size > MAX_REQUEST_BYTES:
            return False
        request = pb.ReadBlocksRequest.FromString(receiver.take(size))
        last = self._answer(connection, request)
        send(connection, [bytes(last)])
        return last[-1] is Mark.END

    def _answer(self, connection: socket.socket, request: pb.ReadBlocksRequest) -> list[Mark]:
        """Sends the frames of a request. The OK of a frame is sent with what follows it, because every message wakes
        the receiver. A ticket whose blocks the ledger found earlier is confirmed after its frame has been sent, while
        the frame is on its way. Returns the marks that end the answer: END, with the OK of the last frame, or a
        refusal.
        """
        ticket = TicketId(Epoch(request.ticket_epoch), request.ticket_secret)
        pending: list[Mark] = []
        try:
            refs = convert.table_from_pb(request.table)
            source = self._source_of(request.arena_id)
            for part in source.parts(ticket, refs):
                with source.reading(part.refs) as reading:
                    head = bytes([*pending, Mark.FRAME]) + FRAME_HEAD.pack(part.first, len(part.refs))
                    pending = []
                    send(connection, [head + reading.digests.tobytes(), *reading.pieces])
                if not part.is_confirmed:
                    source.confirm(ticket)
                pending = [Mark.OK]
        except (Stale, Gone):
            return [*pending, Mark.STALE]
        except (NotHolder, LooseleafError):
            return [*pending, Mark.NOT_HELD]
        except BlockStoreError as error:
            logger.warning("blocks cannot be sent: %s", error)
            return [*pending, Mark.UNAVAILABLE]
        return [*pending, Mark.END]
