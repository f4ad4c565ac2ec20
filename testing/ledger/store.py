"""Provides tests with a real block store (arena, Redis and ledger), in this process or in a separate one, and with
helper functions.
"""

from __future__ import annotations

import ctypes
import hashlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import redis

from block_store.arena.arena import Arena
from block_store.arena.device_memory import DeviceBlocks
from block_store.arena.writer_slots import WriterSlot
from block_store.holder.held_blocks import HeldBlocks
from block_store.ledger import invariants
from block_store.ledger.client import LedgerClient
from block_store.ledger.codec import SealItem
from block_store.ledger.inspection import Inspection, inspect
from block_store.ledger.rebuild import open_ledger
from block_store.ledger.scripts import CallId, LedgerScripts
from common import convert
from common.ticket import TicketId
from common.types import BlockRef, CacheQuota, Epoch, KvLayout, KvSpec
from protos.v1 import block_store_pb2 as pb
from protos.v1 import block_store_pb2_grpc

LAYOUT = KvLayout(16, (KvSpec(num_layers=1, num_kv_heads=1, head_dim=8, dtype="bfloat16"),))


LONG_S = 3600.0
"""The length in seconds of leases that do not end during a test, unless `TestStore.expire` ends them."""


def chain(name: str, length: int) -> list[bytes]:
    """Returns prefix hashes for tests. Chains whose names have the same first letter have the same first hash."""
    return [hashlib.sha256(f"{name[: i + 1] if i == 0 else name}/{i}".encode()).digest() for i in range(length)]


def indexed(ledger: LedgerScripts, hashes_by_group: Sequence[Sequence[bytes]]) -> int:
    """Returns the length in blocks of the longest prefix that is indexed for every group."""
    marks = [ledger.present(hashes) for hashes in hashes_by_group]
    return min(len(list(takewhile(bool, group))) for group in marks)


def patient(client: redis.Redis) -> redis.Redis:
    """Makes a client wait up to a minute for each answer, because Redis may stall for seconds on a busy machine.
    Returns the client.
    """
    client.connection_pool.connection_kwargs["socket_timeout"] = 60.0
    client.connection_pool.disconnect()
    return client


@dataclass(slots=True)
class Caller:
    """A holder without beats, whose calls a test makes directly."""

    ledger: LedgerScripts
    epoch: Epoch
    slot: WriterSlot
    number: int = 0

    def lane(self) -> CallId:
        self.number += 1
        return CallId(self.epoch, self.number)

    @property
    def last(self) -> CallId:
        """The id of the last call, with which a test can repeat the call."""
        return CallId(self.epoch, self.number)


class TestStore:
    """An arena and its ledger in a given Redis."""

    __test__ = False

    def __init__(self, client: redis.Redis, directory: Path, num_blocks: int = 12) -> None:
        self.client = patient(client)
        self.arena = Arena.create(directory, LAYOUT, num_blocks)
        self.ledger = open_ledger(client, self.arena)

    def caller(self, floor: int = 0) -> Caller:
        slot = self.arena.acquire_writer_slot()
        epoch = self.ledger.register("caller", writer_slot=slot.number, floor=floor, lease_s=LONG_S)
        return Caller(self.ledger, epoch, slot)

    def held(self, name: str = "worker", floor: int = 0, reserve: int = 0, beat_s: float | None = None) -> HeldBlocks:
        slot = self.arena.acquire_writer_slot()
        holder = LedgerClient.register(self.ledger, name, writer_slot=slot.number, floor=floor, beat_s=beat_s)
        return HeldBlocks(holder, self.arena, slot, reserve)

    def expire(self, *epochs: Epoch) -> None:
        """Ends these leases by setting their deadlines to a time in the past."""
        self.client.zadd(self.ledger.tag + "leases", {str(epoch): 1 for epoch in epochs})

    def ticket_id(self, epoch: Epoch) -> TicketId:
        """Returns the id of a live ticket, with its secret from the ledger."""
        secret = self.client.hget(f"{self.ledger.tag}holder:{epoch}", "secret")
        assert isinstance(secret, bytes), f"epoch {epoch} is no ticket"
        return TicketId(epoch, secret)

    def moment(self) -> Inspection:
        """Returns the state of the ledger, excluding the remaining lease times."""
        now = inspect(self.ledger, with_blocks=True)
        return replace(now, holders=tuple(replace(holder, lease_ms=0) for holder in now.holders))

    def check(self, before: Inspection | None = None) -> Inspection:
        """Checks the invariants, including those between `before` and now. Returns the state, as `moment` does."""
        now = self.moment()
        assert not (found := invariants.findings(self.ledger, now, before)), found
        return now

    def fill(self, caller: Caller, hashes: Sequence[bytes], quota: CacheQuota | None = None) -> list[BlockRef]:
        """Allocates, writes and seals full blocks with these hashes."""
        refs = self.ledger.alloc(caller.lane(), len(hashes))
        self.write(caller, refs, hashes)
        return self.ledger.seal(caller.lane(), [SealItem(*pair, quota) for pair in zip(refs, hashes, strict=True)])

    def write(self, caller: Caller, refs: Sequence[BlockRef], hashes: Sequence[bytes | None]) -> None:
        """Writes blocks, following the writer rule, and marks them as sealed in the header. The content of a full block
        is a function of its hash.
        """
        if not self.arena.check_refs(refs):  # not in the header yet
            self.arena.raise_generations(refs, caller.slot.number)
        for ref, prefix_hash in zip(refs, hashes, strict=True):
            self.arena.data[ref.block] = content(prefix_hash)
        self.arena.mark_sealed(refs, list(hashes), [self.arena.digest(ref.block) for ref in refs])

    def close(self) -> None:
        self.ledger.forget()
        self.arena.remove()


def content(prefix_hash: bytes | None) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Returns the content of a block with this hash, as uint8 [block_bytes]."""
    return np.resize(np.frombuffer(prefix_hash or b"\xff" * 32, np.uint8), LAYOUT.block_bytes)


class StoreProcess:
    """A block store in a separate process (`python -m block_store`)."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self.directory = directory
        ready = directory.with_suffix(".ready")
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "block_store", "--directory", str(directory), "--port", "0",
                "--ready-file", str(ready), *flags,
            ],
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while not ready.exists():
            assert self.process.poll() is None and time.monotonic() < deadline, self.process.communicate()[1]
            time.sleep(0.02)
        self.address = ready.read_text().splitlines()[0]
        ready.unlink()
        self.channel = grpc.insecure_channel(self.address)
        self.stub: Any = block_store_pb2_grpc.BlockStoreServiceStub(self.channel)  # type: ignore[no-untyped-call]

    def attach(
        self, worker: str, role: str = "prefill", floor: int = 0, layout: KvLayout = LAYOUT, device_uuid: bytes = b""
    ) -> pb.AttachResponse:
        request = pb.AttachRequest(
            worker_id=worker, role=role, layout=convert.layout_to_pb(layout), weights_bytes=1 << 20,
            peak_activation_bytes=1 << 20, max_model_len=64, floor_blocks=floor,
            device_uuid=device_uuid,
        )  # fmt: skip
        reply: pb.AttachResponse = self.stub.Attach(request, timeout=60)
        return reply

    def inspect(self, blocks: bool = False) -> pb.InspectResponse:
        reply: pb.InspectResponse = self.stub.Inspect(pb.InspectRequest(include_blocks=blocks), timeout=60)
        return reply

    def read(self, arena_id: str, ticket: TicketId, refs: Sequence[BlockRef]) -> list[pb.ReadBlocksResponse]:
        request = pb.ReadBlocksRequest(
            arena_id=arena_id, table=convert.table_to_pb(refs), ticket_epoch=ticket.epoch, ticket_secret=ticket.secret
        )
        return list(self.stub.ReadBlocks(request, timeout=60))

    def kill(self) -> None:
        """Sends SIGKILL, and waits until the process has ended."""
        self.channel.close()
        self.process.kill()
        self.process.communicate(timeout=60)

    def stop(self) -> str:
        """Sends SIGTERM, and waits until the process has ended. Returns the text that the process wrote to stderr."""
        self.channel.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        log = self.process.communicate(timeout=60)[1]
        return log


def python(code: str, *args: str) -> subprocess.Popen[str]:
    """Starts another process that runs `code`, with pipes for its input and output."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )


def line(process: subprocess.Popen[str]) -> str:
    """Returns the next line that the process prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def wait_until(holds: Callable[[], object], within_s: float = 60.0) -> None:
    """Waits until `holds()` is true. Raises AssertionError after `within_s`."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def view(blocks: DeviceBlocks) -> npt.NDArray[np.uint8]:
    """Returns the blocks as a uint8 array [num_blocks, block_bytes] that refers to the device memory itself, which
    `__cuda_array_interface__` describes. Works only with the stand-in for the CUDA driver, whose device memory the host
    can access.
    """
    interface = blocks.__cuda_array_interface__
    rows, row_bytes = interface["shape"]
    memory = (ctypes.c_uint8 * (rows * row_bytes)).from_address(interface["data"][0])
    return np.frombuffer(memory, np.uint8).reshape(rows, row_bytes)
