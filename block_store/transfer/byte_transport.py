"""The transport over byte channels (`byte_channel`), which receives blocks directly into the arena."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from block_store.transfer.byte_channel import FRAME_HEAD, SIZE, Mark, Receiver, send
from block_store.transfer.channels import Address, CannotConnect, Channels
from block_store.transfer.source_client import SourceClient, read_request
from block_store.transfer.transport import Copy, Transport
from common.errors import Aborted, Unavailable
from common.telemetry import Fallbacks
from common.trust import NO_TRUST, Trust

RETRY_S = 30.0
"""Time in seconds for which a source is read over gRPC after a connection to its byte channels has failed."""
SHORT_BYTES = 1 << 16
"""Maximum size of an answer that is awaited in the event loop, in bytes."""
SHORT_S = 0.2
"""Time in seconds after which a thread waits for a short answer instead."""
logger = logging.getLogger("byte-transport")


class ByteTransport:
    """A transport over byte channels. If no byte channel to a source can be opened, `otherwise` copies the blocks. Only
    this process stores bytes, in the event loop if the answer is short, or else in the copy's thread. So nothing is
    stored after `fetch` and that thread have ended.
    """

    def __init__(self, sources: SourceClient, otherwise: Transport, max_copies: int, trust: Trust = NO_TRUST) -> None:
        self._sources = sources
        self._otherwise = otherwise
        self._channels = Channels(trust)
        self._threads = ThreadPoolExecutor(max_copies, thread_name_prefix="byte-copy")
        self._closed_until: dict[Address, float] = {}
        """Addresses to which a connection has failed, with the time (of `time.monotonic`) of the next attempt."""
        self.fallbacks = Fallbacks(logger)

    async def fetch(self, copy: Copy) -> None:
        if not copy.refs:
            return
        address = (copy.source.rpartition(":")[0].strip("[]"), self._sources.byte_port(copy.source))
        if address[1] == 0 or time.monotonic() < self._closed_until.get(address, 0.0):
            self.fallbacks.note("blocks over gRPC", f"there is no byte channel to {copy.source}")
            return await self._otherwise.fetch(copy)
        receiving = _Receiving(copy, address, self._channels)
        if receiving.ask_idle() and await receiving.has_answer():
            return receiving.run()
        copy.writing = running = self._threads.submit(receiving.run)
        try:
            await asyncio.wrap_future(running)  # a cancelled wait does not end a thread that runs
        except asyncio.CancelledError:
            receiving.abort()
            if running.cancelled():  # before its thread began
                receiving.close()
            raise
        except CannotConnect as error:
            self._closed_until[address] = time.monotonic() + RETRY_S
            self.fallbacks.note("blocks over gRPC", f"there is no byte channel to {copy.source}: {error}")
            await self._otherwise.fetch(copy)

    def is_quiescent(self, copy: Copy) -> bool:
        return copy.writing is None or copy.writing.done()

    async def close(self) -> None:
        self._channels.close()
        self._threads.shutdown(wait=False)


class _Receiving:
    """The receiver of one copy, in a thread or, if the answer is short, in the event loop."""

    def __init__(self, copy: Copy, address: Address, channels: Channels) -> None:
        self._copy = copy
        self._address = address
        self._channels = channels
        request = read_request(copy.ticket, copy.refs).SerializeToString()
        self._request = SIZE.pack(len(request)) + request
        self._num_sent = 0
        """Number of bytes of the request that `ask_idle` has sent."""
        self._connection: socket.socket | None = None
        self._is_aborted = False

    def ask_idle(self) -> bool:
        """Sends the request over an idle channel, if there is one, so that the source works while the thread starts.
        Does not wait: nothing else is in the channel's buffer, and what does not fit into it is sent by `run`. Returns
        whether the whole request has been sent.
        """
        if (idle := self._channels.take(self._address)) is None:
            return False
        try:
            self._num_sent = idle.send(self._request)
            self._connection = idle
        except OSError:  # the source has closed the channel, or has restarted
            idle.close()
            self._channels.drop(self._address)
        return self._num_sent == len(self._request)

    async def has_answer(self) -> bool:
        """Waits in the event loop for the answer if it is short: to start and end a thread takes 0.1 ms. Returns
        whether the whole answer is in the channel's buffer, so that `run` does not block. If not, the answer is long, a
        refusal or late, or the channel is closed.
        """
        connection, count = self._connection, len(self._copy.refs)
        begin = bytes([Mark.FRAME]) + FRAME_HEAD.pack(0, count)
        end = bytes([Mark.OK, Mark.END])
        num_bytes = len(begin) + count * (8 + self._copy.arena.block_bytes) + len(end)
        if connection is None or num_bytes > SHORT_BYTES or isinstance(connection, ssl.SSLSocket):
            return False
        try:
            if not await _received(connection, num_bytes):
                return False
            answer = connection.recv(num_bytes, socket.MSG_PEEK)  # does not wait: the connection is readable
        except OSError:  # the channel is closed
            return False
        except BaseException:
            self.close()
            raise
        return len(answer) == num_bytes and answer.startswith(begin) and answer.endswith(end)

    def abort(self) -> None:
        """Makes the copy end soon. Any thread may call this method."""
        self._is_aborted = True
        if (connection := self._connection) is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the channel of a copy that has failed, or that does not run."""
        if self._connection is not None:
            self._connection.close()

    def run(self) -> None:
        """Copies the blocks. Raises Unavailable if the source or its ledger does not answer, CannotConnect if no byte
        channel can be opened, and Aborted if the source refuses, breaks the protocol or sends wrong bytes, or if the
        copy was aborted.
        """
        try:
            self._run()
        except OSError as error:
            raise Unavailable("the source of the blocks does not answer", retry_after_s=1.0) from error
        except (ValueError, struct.error) as error:
            raise Aborted(f"the source does not speak the protocol of byte channels: {error}") from error

    def _run(self) -> None:
        try:
            receiver, mark = self._answered()
            while mark is Mark.FRAME:
                mark = self._frame(receiver)
            if mark is not Mark.END:
                raise _refusal(mark)
        except BaseException:
            self.close()
            raise
        if self._connection is not None:
            self._channels.give_back(self._address, self._connection)

    def _answered(self) -> tuple[Receiver, Mark]:
        """Sends what `ask_idle` has not sent, or the whole request over a new channel. Returns the receiver of the
        answer, and the first byte of the answer.
        """
        if (idle := self._connection) is not None:
            try:
                return self._ask(idle, self._num_sent)
            except ConnectionError:  # the source has closed the idle channel, or has restarted
                idle.close()
                if self._is_aborted:
                    raise
                self._channels.drop(self._address)
        self._connection = self._channels.connect(self._address)
        return self._ask(self._connection)

    def _ask(self, connection: socket.socket, num_sent: int = 0) -> tuple[Receiver, Mark]:
        if self._is_aborted:
            raise Aborted("the pull was cancelled")
        send(connection, [self._request[num_sent:]])
        receiver = Receiver(connection)
        return receiver, _mark(receiver)

    def _frame(self, receiver: Receiver) -> Mark:
        """Stores one frame. Returns the byte that follows the frame."""
        first, count = FRAME_HEAD.unpack(receiver.take(FRAME_HEAD.size))
        pieces = self._copy.places(first, count)
        digests = struct.unpack(f"<{count}Q", receiver.take(8 * count))
        receiver.fill(*pieces)
        if (mark := _mark(receiver)) is not Mark.OK:
            raise _refusal(mark)
        self._copy.accept(digests)
        return _mark(receiver)


async def _received(connection: socket.socket, num_bytes: int) -> bool:
    """Waits until `num_bytes` bytes are in the connection's buffer, or the connection is closed. Returns False if
    neither happens within SHORT_S.
    """
    loop = asyncio.get_running_loop()
    received: asyncio.Future[bool] = loop.create_future()

    def end(is_readable: bool) -> None:
        if not received.done():
            received.set_result(is_readable)

    timer = loop.call_later(SHORT_S, end, False)
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
        loop.add_reader(connection, end, True)
        return await received
    finally:
        timer.cancel()
        loop.remove_reader(connection)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)


def _mark(receiver: Receiver) -> Mark:
    return Mark(receiver.take(1)[0])


def _refusal(mark: Mark) -> Exception:
    if mark is Mark.UNAVAILABLE:
        return Unavailable("the source's ledger does not answer", retry_after_s=1.0)
    if mark in (Mark.STALE, Mark.NOT_HELD):
        return Aborted("the source no longer has the ticket's blocks")
    return Aborted(f"the source sent {mark.name} between frames")
