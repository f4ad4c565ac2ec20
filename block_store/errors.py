"""The errors of the block store, including one class per refusal of the ledger (docs/design.md, Ledger)."""

from __future__ import annotations

from common.types import BlockRef


class BlockStoreError(Exception):
    """Base class of all errors that this package raises on purpose."""


class LedgerError(BlockStoreError):
    """Base class of the errors of a ledger operation. A refused operation has changed nothing. After LedgerUnavailable
    or LedgerDamaged, the operation may have taken effect.
    """


class Fenced(LedgerError):
    """Raised if the holder's lease has ended and the holder has been reaped. Stop, free the writer slot, and register
    again.
    """


class Stale(LedgerError):
    """Raised if a block is not in the state or generation that the caller expects."""


class NotHolder(LedgerError):
    """Raised if the caller does not hold one of the blocks."""


class Gone(LedgerError):
    """Raised if the ticket has been claimed or has ended, or if the secret is wrong."""


class StaleDataset(LedgerError):
    """Raised if Redis has lost the ledger, or if the ledger has been or will be rebuilt. Data from the old ledger is
    invalid.
    """


class LedgerDamaged(LedgerError):
    """Raised if a script failed on the data in Redis, or if its reply is unreadable. The ledger must be rebuilt."""


class OutOfOrder(LedgerError):
    """Raised if a call's number is below that of the holder's last call: the ledger was changed, or two lanes serve the
    same holder.
    """


class Exhausted(LedgerError):
    """Raised if fewer blocks are available than requested."""

    def __init__(self, wanted: int, available: int) -> None:
        super().__init__(f"{wanted} blocks wanted, {available} are available (others' unused floors are kept free)")
        self.wanted = wanted
        self.available = available


class FloorsExceedArena(LedgerError):
    """Raised if the floors of all live holders would not fit into the arena."""

    def __init__(self, floors: int, num_blocks: int) -> None:
        super().__init__(f"the workers' floors need {floors} blocks, the arena has {num_blocks}")
        self.floors = floors
        self.num_blocks = num_blocks


class LedgerUnavailable(LedgerError):
    """Raised if Redis did not answer. The operation may or may not have taken effect; repeat the call to find out."""


class RedisUnusable(BlockStoreError):
    """Raised if Redis cannot be reached or started, or if its configuration would lose references."""


class DiskTierError(BlockStoreError):
    """Raised if the disk tier cannot be used."""


class ArenaError(BlockStoreError):
    """Raised if the arena cannot be created or used."""


class ArenaExists(ArenaError):
    """Raised if an arena already exists. An existing arena is never truncated."""


class ArenaBusy(ArenaError):
    """Raised if another process owns the arena's device memory."""


class ArenaLost(ArenaError):
    """Raised if the arena's memory is lost or its store has removed the arena. End the process; its successor attaches
    to a new arena.
    """


class LayoutMismatch(ArenaError):
    """Raised if the arena was created for a different KV layout."""


class NotEnoughSharedMemory(ArenaError):
    """Raised if the arena does not fit into the shared-memory filesystem."""

    def __init__(self, directory: str, needed_bytes: int, available_bytes: int) -> None:
        super().__init__(
            f"shared memory at {directory}: the arena needs {needed_bytes} bytes, {available_bytes} are available; "
            "lower the memory budget or enlarge the filesystem (docker: --shm-size)"
        )
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class HeaderAheadError(ArenaError):
    """Raised if a block's header generation is not below the new generation, which means that the ledger is older than
    the arena. Do not write into the block.
    """

    def __init__(self, ref: BlockRef, found: int) -> None:
        super().__init__(f"block {ref.block}: header has generation {found}, not below {ref.generation}")
        self.ref = ref
        self.found = found


class HeaderMismatch(ArenaError):
    """Raised if a block's header does not name the generation in the block table, because the block has been
    reallocated.
    """
