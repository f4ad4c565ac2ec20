"""The store's side of a NIXL agent, which runs in a process of its own (`nixl_process`).

A read ends if the process reports that it is complete, or when the process has died. If a read fails or takes longer
than READ_S, this side kills the process, because NIXL cannot cancel a read, and starts another one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

import msgspec

from block_store.arena.arena import Arena
from block_store.arena.writer_slots import WriterSlot
from block_store.transfer import nixl_process
from block_store.transfer.nixl_process import Answer, Failed, Map, Mapped, Order, Read, Refused, Started
from common.errors import StartupError, Unavailable
from common.telemetry import Fallbacks

READ_S = 4.0
"""Maximum time in seconds of a read, after which the process is killed."""
START_S = 60.0
RESTART_S = 0.5
MAX_RESTART_S = 30.0
RDMA, TCP = "ib", "tcp"
"""The transports that UCX may use (UCX_TLS): those of InfiniBand and RoCE; and TCP, for tests."""
NO_TCP = (
    "NIXL is not used over TCP: a cancelled read can still write into the arena, a frozen source is not noticed, and "
    "whoever reaches the agent's port can read and write its memory. Use --transport bytes"
)
_KEPT = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "HOME")
"""The environment of the process, and variables of UCX and NIXL. Others may contain passwords, and over UCX, other
hosts may be able to read all memory of the process.
"""
_ANSWERS = msgspec.msgpack.Decoder(Answer)
logger = logging.getLogger("nixl")


class NixlAgent:
    """A NIXL agent for one arena. All methods run in the event loop."""

    def __init__(self, *, over_tcp: bool = False) -> None:
        """Creates an agent that has not been started. `over_tcp` is for tests on machines without RDMA."""
        self._tls = TCP if over_tcp else RDMA
        self._arena: Arena | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._socket: socket.socket | None = None
        self._started: asyncio.Future[None] | None = None
        self._mapping: asyncio.Future[Mapped] | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._reads: dict[int, asyncio.Future[None]] = {}
        self._num_reads = 0
        self.fallbacks = Fallbacks(logger)

    @property
    def is_mapped(self) -> bool:
        """Whether the process has registered the arena. False while the process starts."""
        return self._mapping is not None and self._mapping.done()

    @property
    def pid(self) -> int | None:
        """The id of the process; None while it starts."""
        return None if self._process is None else self._process.pid

    async def __aenter__(self) -> NixlAgent:
        """Starts the process, and later starts another one whenever it ends. Raises StartupError if NIXL is not
        installed, or if there is no RDMA device.
        """
        if self._tls == TCP:
            logger.warning("NIXL over TCP is for tests: whoever reaches its port can read and write the arena")
        await self._start()
        self._keeping = asyncio.create_task(self._keep())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Kills the process."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait({self._keeping})
        self.kill()
        if self._process is not None:
            await self._process.wait()
        self._over()

    async def use(self, arena: Arena) -> Mapped:
        """Registers an arena in host memory, as will all later processes. An agent can have only one arena. Raises
        Unavailable if there is no process at the moment, or if it ends meanwhile.
        """
        assert self._arena in (None, arena)
        self._arena = arena
        if self._mapping is None:
            self._map(arena)
        assert self._mapping is not None
        return await asyncio.shield(self._mapping)

    def read(
        self, peer: bytes, addresses: Sequence[int], blocks: Sequence[int], slot: WriterSlot
    ) -> asyncio.Future[None]:
        """Begins to read blocks from `addresses` of the agent `peer`, which has returned its metadata `Mapped.agent`,
        into `blocks` of the arena, which name the writer slot `slot` in their headers.

        Returns a future that is done when nothing will be written any more. Its exception is Unavailable if the
        process has died before the read was complete. Do not cancel it. Raises Unavailable if the read cannot begin.
        """
        loop = asyncio.get_running_loop()
        self._num_reads += 1
        order = Read(self._num_reads, peer, list(addresses), list(blocks))
        self._send(order, [slot.fileno()])
        self._reads[order.number] = read = loop.create_future()
        read.add_done_callback(lambda done: done.exception())
        overdue = loop.call_later(READ_S, self._end, f"a read has not ended after {READ_S:g} s")
        read.add_done_callback(lambda _: overdue.cancel())
        return read

    def kill(self) -> None:
        """Kills the process. Its reads end, with an error, when it has died."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._started = loop.create_future()
        try:
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", nixl_process.__name__, str(theirs.fileno()),
                    pass_fds=[theirs.fileno()], stdin=asyncio.subprocess.DEVNULL, stdout=2, env=self._environment(),
                )  # fmt: skip
            loop.add_reader(self._socket, self._receive)
            async with asyncio.timeout(START_S):
                await self._started
        except BaseException as error:
            self.kill()
            if self._process is not None:
                await self._process.wait()
            self._over()
            if isinstance(error, TimeoutError):
                raise StartupError(f"the NIXL agent has not started within {START_S:g} s") from None
            raise
        if self._arena is not None and self._mapping is None:  # `use` may have sent the order meanwhile
            with suppress(Unavailable):  # the process has ended again
                self._map(self._arena)

    def _environment(self) -> dict[str, str]:
        kept = {name: text for name, text in os.environ.items() if name in _KEPT or name.startswith(("UCX_", "NIXL_"))}
        return {"UCX_WARN_UNUSED_ENV_VARS": "n", **kept, "UCX_TLS": self._tls}

    async def _keep(self) -> None:
        """Starts another process whenever it ends."""
        pause_s = RESTART_S
        while True:
            if self._process is not None:
                status = await self._process.wait()
                self._over()
                self.fallbacks.note("the NIXL agent has ended", f"with status {status}; it is started again")
            await asyncio.sleep(pause_s)
            try:
                await self._start()
                pause_s = RESTART_S
            except (StartupError, OSError) as error:
                logger.error("the NIXL agent cannot start again: %s", error)
                pause_s = min(2 * pause_s, MAX_RESTART_S)

    def _over(self) -> None:
        """Ends everything that belonged to a process that has died."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
        self._socket = self._process = None
        for read in self._reads.values():
            read.set_exception(_unavailable("has ended"))
        self._reads = {}
        if self._mapping is not None and not self._mapping.done():
            self._mapping.set_exception(_unavailable("has ended"))
        self._mapping = None

    def _map(self, arena: Arena) -> None:
        self._send(Map(str(arena.directory)))
        self._mapping = asyncio.get_running_loop().create_future()
        self._mapping.add_done_callback(lambda done: done.exception())

    def _send(self, order: Order, fds: Sequence[int] = ()) -> None:
        if self._socket is None:
            raise _unavailable("is starting")
        try:
            socket.send_fds(self._socket, [msgspec.msgpack.encode(order)], list(fds))
        except OSError as error:
            raise _unavailable(f"takes no order: {error}") from error

    def _receive(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(nixl_process.MAX_MESSAGE_BYTES)
        except OSError:
            data = b""
        if not data:  # the process has ended, or is about to
            asyncio.get_running_loop().remove_reader(self._socket)
            self._refuse(Refused("its agent has ended", is_installed=False))
            self.kill()
            return
        answer = _ANSWERS.decode(data)
        if isinstance(answer, Started):
            assert self._started is not None
            self._started.set_result(None)
        elif isinstance(answer, Refused):
            self._refuse(answer)
        elif isinstance(answer, Mapped):
            assert self._mapping is not None
            self._mapping.set_result(answer)
        elif isinstance(answer, Failed):
            self._end(answer.reason)
        elif (read := self._reads.pop(answer.number, None)) is not None:
            read.set_result(None)

    def _refuse(self, refused: Refused) -> None:
        if self._started is not None and not self._started.done():
            why = f" (UCX_TLS={self._tls}). {NO_TCP}" if refused.is_installed and self._tls == RDMA else ""
            self._started.set_exception(StartupError(f"NIXL cannot be used: {refused.reason}{why}"))

    def _end(self, reason: str) -> None:
        logger.warning("the NIXL agent is killed: %s", reason)
        self.kill()


def _unavailable(what: str) -> Unavailable:
    return Unavailable(f"the NIXL agent {what}", retry_after_s=1.0)
