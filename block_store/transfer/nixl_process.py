"""The process of a NIXL agent. It registers an arena's memory, so that agents of other hosts can read it, and reads
blocks from their memory into the arena.

NIXL cannot cancel a read. After a read was released or has failed, and even after its peer was removed, bytes can still
arrive in the arena; only the death of the process prevents that. Therefore the agent has a process of its own, which
the block store starts (`nixl_agent`) and kills if the outcome of a read is unknown. The process ends when the store
closes its end of their socket.

Each read comes with the descriptor of the writer slot that its destination's blocks name. The process keeps the
descriptor until the read is complete. If the store dies, the slot thus stays locked, and the blocks stay in quarantine,
for as long as this process may write to them.
"""

from __future__ import annotations

import importlib
import os
import secrets
import select
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import msgspec

from block_store.arena.arena import Arena

PACKAGES = ("nixl_cu13", "nixl_cu12")
"""The packages that contain NIXL, for two versions of CUDA. Neither needs CUDA for host memory."""
IDLE_S = 0.005
"""Interval in seconds at which an agent without reads answers other agents that want to connect."""
BUSY_S = 0.0002
"""Interval in seconds at which the agent looks whether its reads are complete."""
MAX_MESSAGE_BYTES = 1 << 17


class Map(msgspec.Struct, frozen=True, tag=True):
    """The store's order to register the blocks of an arena. The answer is `Mapped`."""

    directory: str


class Read(msgspec.Struct, frozen=True, tag=True):
    """The store's order to read blocks. It comes with a writer slot. The answer is `Done` or `Failed`."""

    number: int
    peer: bytes
    """`Mapped.agent` of the source."""
    addresses: list[int]
    """Addresses of the blocks in the source's memory."""
    blocks: list[int]
    """Numbers of the blocks of this arena, one for each address."""


class Started(msgspec.Struct, frozen=True, tag=True):
    """The agent can transfer."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """NIXL cannot be used. The process ends."""

    reason: str
    is_installed: bool


class Mapped(msgspec.Struct, frozen=True, tag=True):
    """The arena is registered."""

    agent: bytes
    """NIXL's metadata of this agent, which other agents need."""
    address: int
    """Address of block 0."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """All bytes of a read have arrived, and nothing more will be written for it."""

    number: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A read has failed. It may still write."""

    number: int
    reason: str


Order = Map | Read
Answer = Started | Refused | Mapped | Done | Failed
_ORDERS = msgspec.msgpack.Decoder(Order)


class Agent:
    """A NIXL agent that follows the orders that arrive on a socket."""

    def __init__(self, nixl: Any, store: socket.socket) -> None:
        """Creates the agent. Raises an error of NIXL if UCX has no transport."""
        # NIXL's own thread would use all idle time of a core.
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._nixl = nixl.nixl_agent(secrets.token_hex(8), config)
        self._store = store
        self._arena: Arena | None = None
        self._peers: dict[bytes, str] = {}
        self._reads: dict[int, tuple[Any, int]] = {}
        """The handle and the descriptor of the writer slot of each read, until it is complete."""

    def run(self) -> None:
        """Follows orders until the store closes the socket."""
        poll = select.poll()
        poll.register(self._store, select.POLLIN)
        while True:
            if poll.poll(1000 * (BUSY_S if self._reads else IDLE_S)):
                data, fds, _, _ = socket.recv_fds(self._store, MAX_MESSAGE_BYTES, 1)
                if not data:
                    return
                self._follow(_ORDERS.decode(data), fds)
            self._nixl.get_new_notifs()  # makes UCX answer other agents
            for answer in self._ended():
                self._tell(answer)

    def _follow(self, order: Order, fds: list[int]) -> None:
        if isinstance(order, Map):
            self._tell(self._map(order.directory))
            return
        try:
            handle = self._begin(order)
        except Exception as error:
            self._tell(Failed(order.number, f"{type(error).__name__}: {error}"))
        else:
            self._reads[order.number] = handle, fds[0]

    def _map(self, directory: str) -> Mapped:
        self._arena = arena = Arena.open(directory)
        self._nixl.register_memory([(arena.data.ctypes.data, arena.data.nbytes, 0, "")], "DRAM")
        return Mapped(self._nixl.get_agent_metadata(), arena.data.ctypes.data)

    def _begin(self, order: Read) -> Any:
        assert self._arena is not None
        if order.peer not in self._peers:
            self._peers[order.peer] = self._nixl.add_remote_agent(order.peer)
        size, base = self._arena.block_bytes, self._arena.data.ctypes.data
        here = self._nixl.get_xfer_descs([(base + block * size, size, 0) for block in order.blocks], "DRAM")
        there = self._nixl.get_xfer_descs([(address, size, 0) for address in order.addresses], "DRAM")
        handle = self._nixl.initialize_xfer("READ", here, there, self._peers[order.peer])
        self._nixl.transfer(handle)
        return handle

    def _ended(self) -> Iterator[Answer]:
        """Yields the answers to reads that have ended. The writer slot of a failed read stays locked."""
        for number, (handle, slot) in list(self._reads.items()):
            try:
                state = self._nixl.check_xfer_state(handle)
            except Exception as error:
                state = f"{type(error).__name__}: {error}"
            if state == "PROC":
                continue
            del self._reads[number]
            if state == "DONE":
                self._nixl.release_xfer_handle(handle)
                os.close(slot)
                yield Done(number)
            else:
                yield Failed(number, state)

    def _tell(self, answer: Answer) -> None:
        self._store.sendall(_encoded(answer))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the store too, which ends this process
    store = socket.socket(fileno=int(sys.argv[1]))
    try:
        nixl = _nixl()
    except ImportError as error:
        return store.sendall(_encoded(Refused(str(error), is_installed=False)))
    try:
        agent = Agent(nixl, store)
    except Exception as error:
        reason = f"UCX found no device, {type(error).__name__} {error}"
        return store.sendall(_encoded(Refused(reason, is_installed=True)))
    store.sendall(_encoded(Started()))
    try:
        agent.run()
    except BaseException:
        traceback.print_exc()
    os._exit(1)  # without UCX's orderly end, which may wait for other agents


def _encoded(answer: Answer) -> bytes:
    return msgspec.msgpack.encode(answer)


def _nixl() -> Any:
    """Returns the module of NIXL. Raises ImportError if it is not installed."""
    for package in PACKAGES:
        try:
            return importlib.import_module(f"{package}._api")
        except ModuleNotFoundError as error:
            if error.name != package:
                raise
    raise ImportError("NIXL is not installed: pip install 'looseleaf[nixl]'")


if __name__ == "__main__":
    main()
