"""Errors of the block store, one class per refusal of the ledger (docs/design.md, Ledger). Does not use gRPC."""

from __future__ import annotations

from common.types import BlockRef


class BlockStoreError(Exception):
    """Base of all errors that this package raises on purpose."""


class LedgerError(BlockStoreError):
    """The ledger refused an operation, which changed nothing, or gave no answer (LedgerUnavailable)."""


class Fenced(LedgerError):
    """The holder's lease has ended, and the holder has been reaped. Stop, free the writer slot, and register again."""


class Stale(LedgerError):
    """A block is not in the state or generation that the caller expects."""


class NotHolder(LedgerError):
    """The caller does not hold one of the blocks."""


class Gone(LedgerError):
    """The ticket has been claimed or has expired, or the secret is wrong."""


class StaleDataset(LedgerError):
    """The ledger has been or will be rebuilt (or a different Redis answers). Everything known about the old one is
    void.
    """


class LedgerDamaged(LedgerError):
    """A script failed on the data in Redis, or its reply is unreadable. The ledger must be rebuilt."""


class OutOfOrder(LedgerError):
    """A call's number is below the holder's last one. Either the ledger was changed, or two lanes are used for the same
    holder.
    """


class Exhausted(LedgerError):
    """Fewer blocks are available than requested."""

    def __init__(self, wanted: int, available: int) -> None:
        super().__init__(f"{wanted} blocks wanted, {available} are available (others' unused floors are kept free)")
        self.wanted = wanted
        self.available = available


class FloorsExceedArena(LedgerError):
    """The floors of all live holders would not fit into the arena."""

    def __init__(self, floors: int, num_blocks: int) -> None:
        super().__init__(f"the workers' floors need {floors} blocks, the arena has {num_blocks}")
        self.floors = floors
        self.num_blocks = num_blocks


class LedgerUnavailable(LedgerError):
    """Redis gave no answer. Only repeating the call can show whether the operation happened."""


class RedisUnusable(BlockStoreError):
    """Redis cannot be reached or started, or its configuration would lose references."""


class DiskTierError(BlockStoreError):
    """The disk tier cannot be used."""


class ArenaError(BlockStoreError):
    """The arena cannot be created or used."""


class ArenaExists(ArenaError):
    """An arena already exists. It is never truncated."""


class ArenaBusy(ArenaError):
    """Another process owns the arena's device memory."""


class ArenaLost(ArenaError):
    """The arena's memory is lost, or its store has removed it. End the process; its successor attaches to
    a new arena.
    """


class LayoutMismatch(ArenaError):
    """The arena was created for a different KV layout."""


class NotEnoughSharedMemory(ArenaError):
    """The arena does not fit into the shared-memory filesystem."""

    def __init__(self, directory: str, needed_bytes: int, available_bytes: int) -> None:
        super().__init__(
            f"shared memory at {directory}: the arena needs {needed_bytes} bytes, {available_bytes} are available; "
            "lower the memory budget or enlarge the filesystem (docker: --shm-size)"
        )
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class HeaderAheadError(ArenaError):
    """A block's header generation is not below the new one, so the ledger is older than the arena.

    Do not write into the block.
    """

    def __init__(self, ref: BlockRef, found: int) -> None:
        super().__init__(f"block {ref.block}: header has generation {found}, not below {ref.generation}")
        self.ref = ref
        self.found = found


class HeaderMismatch(ArenaError):
    """A block's header does not name the generation in the block table: the block has been reallocated."""
