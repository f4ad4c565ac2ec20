"""The errors of the block store, including one class per refusal of the ledger (docs/design.md, Ledger)."""

from __future__ import annotations

from common.types import BlockRef


class BlockStoreError(Exception):
    """Base class of most errors that this package defines."""


class LedgerError(BlockStoreError):
    """Base class of the errors of a ledger operation. A call that the ledger refuses has not taken effect. A call that
    fails with LedgerUnavailable or LedgerDamaged may have taken effect.
    """


class Fenced(LedgerError):
    """Raised if the holder has been reaped after the end of its lease, if it has been closed, or if the arena is lost.
    The process must stop writing and close its writer slot. Unless the arena is lost, it may then register again.
    """


class Stale(LedgerError):
    """Raised if a block does not have the state or the generation that the caller expects, or if a ticket names blocks
    that it does not hold.
    """


class NotHolder(LedgerError):
    """Raised if the caller, or the ticket that it names, does not hold one of the blocks, or if more of the caller's
    sequences give up a block than hold it.
    """


class Gone(LedgerError):
    """Raised if the ticket has been claimed or has ended, or if the secret is wrong."""


class StaleDataset(LedgerError):
    """Raised if Redis has lost the ledger, or if the ledger has been or will be rebuilt. Data from the old ledger is
    invalid.
    """


class LedgerDamaged(LedgerError):
    """Raised if a script fails on the data in Redis, or if a reply or other data read from Redis is unreadable. The
    ledger must be rebuilt.
    """


class OutOfOrder(LedgerError):
    """Raised if a call's number is below that of the holder's last call. Either a different program has changed the
    ledger, or two lanes serve the same holder.
    """


class Exhausted(LedgerError):
    """Raised if fewer blocks are available than requested."""

    def __init__(self, wanted: int, available: int) -> None:
        super().__init__(f"{wanted} blocks wanted, but {available} are available (others' unused floors are kept free)")
        self.wanted = wanted
        self.available = available


class FloorsExceedArena(LedgerError):
    """Raised if the floors of all live holders would not fit into the arena."""

    def __init__(self, floors: int, num_blocks: int) -> None:
        super().__init__(f"the workers' floors need {floors} blocks, but the arena has {num_blocks}")
        self.floors = floors
        self.num_blocks = num_blocks


class LedgerUnavailable(LedgerError):
    """Raised if the ledger or Redis cannot be used at the moment: Redis does not answer in time or reports an error,
    the breaker is open, or the ledger is being rebuilt. If the call was sent, the operation may have taken effect.
    """


class RedisUnusable(BlockStoreError):
    """Raised if Redis cannot be reached or started, if its version is too old, or if its configuration would lose
    references.
    """


class DiskTierError(BlockStoreError):
    """Raised if the disk tier cannot be used."""


class ArenaError(BlockStoreError):
    """Raised if the arena cannot be created or used."""


class ArenaExists(ArenaError):
    """Raised if the directory already contains an arena."""


class ArenaBusy(ArenaError):
    """Raised if another process owns the arena's device memory."""


class ArenaLost(ArenaError):
    """Raised if the arena's memory is lost or the arena has been removed. A worker must then end; its successor
    attaches to a new arena.
    """


class LayoutMismatch(ArenaError):
    """Raised if the arena was created for a different KV layout."""


class NotEnoughSharedMemory(ArenaError):
    """Raised if the arena does not fit into the shared-memory filesystem."""

    def __init__(self, directory: str, needed_bytes: int, available_bytes: int) -> None:
        super().__init__(
            f"shared memory at {directory}: the arena needs {needed_bytes} bytes, but {available_bytes} are available; "
            "lower the memory budget or enlarge the filesystem (docker: --shm-size)"
        )
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class HeaderAheadError(ArenaError):
    """Raised if a block's header generation is not below the new generation. This happens if the ledger is older than
    the arena, or if the arena is lost. Do not write into the block.
    """

    def __init__(self, ref: BlockRef, found: int) -> None:
        super().__init__(f"block {ref.block}: header has generation {found}, not below {ref.generation}")
        self.ref = ref
        self.found = found


class HeaderMismatch(ArenaError):
    """Raised if a block's header does not name the generation in the block table, because the block has been
    reallocated or the arena is lost.
    """
