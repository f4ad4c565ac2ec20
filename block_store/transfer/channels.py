"""A pool of idle byte channels (`byte_channel`), which also opens new ones."""

from __future__ import annotations

import socket
import threading
import time
from typing import NamedTuple

from block_store.transfer.byte_channel import NONCE_BYTES, Receiver, prepare, proof, send
from common.certificates import INSIDE_NAME, Stamp
from common.trust import NO_TRUST, Trust

CONNECT_S = 1.0
IDLE_S = 50.0
"""Time in seconds after which an idle channel is closed. The source closes it a little later (`byte_server.IDLE_S`)."""
Address = tuple[str, int]


class CannotConnect(Exception):
    """Raised if no byte channel to a source can be opened."""


class _Idle(NamedTuple):
    stamp: Stamp
    """Version of the certificates that the channel uses."""
    since: float
    """Time of `time.monotonic` at which the channel was given back."""
    connection: socket.socket


class Channels:
    """A pool of idle byte channels, by the address of the source. `take` and `close` run in the event loop, `connect`
    in the threads of copies, and `drop` and `give_back` in both.
    """

    def __init__(self, trust: Trust = NO_TRUST) -> None:
        self._trust = trust
        self._lock = threading.Lock()
        self._idle: dict[Address, list[_Idle]] = {}
        """The idle channels to each address, the most recently used last."""

    def take(self, address: Address) -> socket.socket | None:
        """Returns an idle channel to this address, or None. Closes channels whose certificates have been replaced, and
        the channels to any address that have been idle for IDLE_S seconds.
        """
        stamp = self._trust.stamp
        with self._lock:
            self._close_old()
            idle = self._idle.get(address, [])
            while idle:
                used, _, connection = idle.pop()
                if used == stamp:
                    return connection
                connection.close()
        return None

    def give_back(self, address: Address, connection: socket.socket) -> None:
        with self._lock:
            idle = self._idle.setdefault(address, [])
            idle.append(_Idle(self._trust.stamp, time.monotonic(), connection))

    def connect(self, address: Address) -> socket.socket:
        """Returns a new channel. Raises CannotConnect if no connection can be made or the handshake fails, and
        TimeoutError if the other end accepts the connection but does not answer.
        """
        try:
            connection = socket.create_connection(address, CONNECT_S)
        except OSError as error:
            raise CannotConnect(str(error)) from error
        try:
            prepare(connection)
            if (files := self._trust.certificates) is not None:
                connection = files.client_context().wrap_socket(connection, server_hostname=INSIDE_NAME)
            send(connection, [proof(self._trust.secret, Receiver(connection).take(NONCE_BYTES))])
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError) and not isinstance(error, TimeoutError):
                raise CannotConnect(str(error)) from error
            raise
        return connection

    def drop(self, address: Address) -> None:
        """Closes the idle channels to an address. If the server has closed one of them, it has probably closed the
        others too.
        """
        with self._lock:
            dropped = self._idle.pop(address, [])
        for each in dropped:
            each.connection.close()

    def close(self) -> None:
        for address in list(self._idle):
            self.drop(address)

    def _close_old(self) -> None:
        oldest = time.monotonic() - IDLE_S
        for address, idle in list(self._idle.items()):
            while idle and idle[0].since < oldest:
                idle.pop(0).connection.close()
            if not idle:
                del self._idle[address]
