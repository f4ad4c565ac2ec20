"""A host for tests, with a block store, a separate Redis, and a worker."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from block_store.arena.arena import Arena
from block_store.holder.held_blocks import HeldBlocks
from block_store.ledger.client import LedgerClient
from block_store.ledger.codec import SealItem
from block_store.ledger.scripts import LedgerScripts
from block_store.redis.redis_server import open_client
from common import convert
from common.ticket import Ticket
from common.types import BlockRef, KvLayout
from protos.v1 import block_store_pb2 as pb
from testing.ledger.store import LAYOUT, StoreProcess, wait_until


class Host:
    """A store process, together with a worker in this process that writes and claims the store's blocks."""

    def __init__(
        self, directory: Path, num_blocks: int, *flags: str, layout: KvLayout = LAYOUT, floor: int = 0
    ) -> None:
        """Starts the store. `floor` is the worker's floor, which is then also the floor of pulled blocks."""
        directory.parent.mkdir(parents=True, exist_ok=True)
        self.store = StoreProcess(directory, "--num-blocks", str(num_blocks), "--expect-workers", "1", *flags)
        reply = self.store.attach("worker", layout=layout)
        self.stub: Any = self.store.stub
        self.arena = Arena.open(reply.directory, layout.fingerprint)
        slot = self.arena.acquire_writer_slot()
        ledger = LedgerScripts.attach(open_client(reply.redis_url, self.arena.fixed.run_id, 60.0), self.arena)
        holder = LedgerClient.register(ledger, "worker", writer_slot=slot.number, floor=floor)
        self.held = HeldBlocks(holder, self.arena, slot)
        self._lock = threading.Lock()
        """A lock for `HeldBlocks`, which only one thread at a time may use."""

    def fill(self, hashes: Sequence[bytes], *, partial: bool = False) -> tuple[list[BlockRef], list[BlockRef]]:
        """Writes and seals a full block for every hash and, if `partial` is True, a partial block. Returns the full
        blocks and the partial blocks.
        """
        refs = self.held.alloc(len(hashes) + partial)
        for number, ref in enumerate(refs):
            self.arena.data[ref.block] = (ref.block * 31 + number) % 251
        names = [*hashes, *[None] * partial]
        sealed = self.held.seal([SealItem(ref, name) for ref, name in zip(refs, names, strict=True)])
        return sealed[: len(hashes)], sealed[len(hashes) :]

    def hand_over(self, branches: Sequence[Sequence[Sequence[BlockRef]]]) -> Ticket:
        """Returns a ticket for block tables whose blocks `fill` has returned."""
        seen: set[BlockRef] = set()
        for ref in (ref for branch in branches for table in branch for ref in table):
            if ref in seen:
                self.held.share([ref])
            seen.add(ref)
        ticket = self.held.hand_over(branches)
        tables = tuple(tuple(tuple(table) for table in branch) for branch in branches)
        return Ticket(self.arena.arena_id, ticket, tables, tuple(16 * len(branch[0]) for branch in tables))

    def request(self, source: Host, ticket: Ticket) -> pb.PullRequest:
        return pb.PullRequest(ticket=convert.ticket_to_pb(ticket), source=source.store.address)

    def pull(self, source: Host, ticket: Ticket) -> pb.PullResponse:
        """Pulls a ticket's blocks to this host."""
        response: pb.PullResponse = self.stub.Pull(self.request(source, ticket), timeout=60)
        return response

    def begin_early(self, source: Host, ticket: Ticket) -> Any:
        """Returns a call that copies a ticket's blocks to this host, and holds the copies while it is open."""
        request = pb.PullEarlyRequest(ticket=convert.ticket_to_pb(ticket), source=source.store.address)
        return self.stub.PullEarly(request, timeout=60)

    def pull_early(self, source: Host, ticket: Ticket) -> Any:
        """Copies a ticket's blocks to this host, and ends the ticket. Returns the open call, which holds the copies,
        and whose attribute `num_tokens` is the number of copied positions. Raises grpc.RpcError if there is no copy.
        """
        call = self.begin_early(source, ticket)
        try:
            call.num_tokens = next(call).num_tokens
        finally:
            source.end(ticket)
        return call

    def bytes_of(self, ticket: Ticket) -> list[list[bytes]]:
        """Checks the generations of a ticket's blocks. Returns the bytes of each block, by table."""
        tables = [table for branch in ticket.tables for table in branch]
        assert all(self.arena.check_refs(table) for table in tables)
        return [[self.arena.read(ref.block) for ref in table] for table in tables]

    def claim_and_release(self, ticket: Ticket) -> None:
        """Claims a ticket and releases its blocks, like a decode worker that does not decode."""
        with self._lock:
            tables = self.held.claim(ticket)
            self.held.release_many(table for branch in tables for table in branch)

    def end(self, ticket: Ticket) -> None:
        with self._lock:
            self.held.decline(ticket)

    def lease_ms(self, ticket: Ticket) -> int:
        """Returns the time left on a ticket's lease, in ms."""
        return next(int(h.lease_ms) for h in self.store.inspect().holders if h.epoch == ticket.id.epoch)

    def assert_idle(self) -> None:
        """Waits until no holder has a sealed or reserved block. Raises AssertionError if this takes too long."""
        wait_until(lambda: self.store.inspect().sealed == 0 == self.store.inspect().reserved)

    def stop(self) -> None:
        self.held.holder.lease.end()
        self.store.stop()
