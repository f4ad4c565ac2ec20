"""A TCP relay between two services, for tests. It can change a byte, or stop passing answers on."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Relay:
    """A relay that passes connections on to a port of this machine. Clients connect to the relay's own `port`."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.flip_after: int | None = None
        """Number of bytes of answers to pass on before one byte is changed, or None to change no byte."""
        self.is_open = threading.Event()
        """Answers pass while this event is set."""
        self.is_open.set()
        self._sockets = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self.is_open.set()
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [client, server]
                threading.Thread(target=self._pass, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._pass, args=(server, client, True), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        with suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                if is_answer:
                    self.is_open.wait()
                    self._flip(data)
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _flip(self, data: bytearray) -> None:
        if self.flip_after is not None and self.flip_after < len(data):
            data[self.flip_after] ^= 1
            self.flip_after = None
        elif self.flip_after is not None:
            self.flip_after -= len(data)
