"""Reads the ledger for `Inspect`, and builds the response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from block_store.arena.arena import Arena
from block_store.ledger.inspection import (
    BlockView,
    HolderView,
    Inspection,
    block_states,
    inspect,
    some_blocks,
)
from block_store.ledger.scripts import LedgerScripts
from block_store.server.disk_tier import DiskTier
from common.errors import InvalidArgument
from protos.v1 import block_store_pb2 as pb

MOST_NAMED = 256
"""Maximum number of blocks that a request may name."""


def check_named(blocks: Sequence[int], num_blocks: int) -> None:
    """Raises InvalidArgument if there are more than MOST_NAMED block numbers, or if one is not below `num_blocks`."""
    if len(blocks) > MOST_NAMED:
        raise InvalidArgument.of("blocks", f"must be at most {MOST_NAMED}, got {len(blocks)}")
    if blocks and max(blocks) >= num_blocks:
        raise InvalidArgument.of("blocks", f"must be below {num_blocks}, got {max(blocks)}")


def is_long(request: pb.InspectRequest) -> bool:
    """Returns whether the time to build the response grows with the arena."""
    return request.include_blocks or request.include_states


def inspected(
    request: pb.InspectRequest, arena: Arena, ledger: LedgerScripts, disk: DiskTier | None
) -> pb.InspectResponse:
    """Reads the ledger, and returns the response to `Inspect`. `disk` is None if the store keeps no blocks on disk.
    Raises LedgerUnavailable if Redis does not answer, StaleDataset if the ledger has been or will be rebuilt, and
    LedgerDamaged if its data cannot be read.
    """
    response = _response(arena, inspect(ledger, request.include_blocks), disk)
    if request.include_states:
        response.states = block_states(ledger)
    if request.blocks and not request.include_blocks:
        response.blocks.extend(map(_block_info, request.blocks, some_blocks(ledger, request.blocks)))
    return response


def _response(arena: Arena, moment: Inspection, disk: DiskTier | None) -> pb.InspectResponse:
    counts = moment.counts
    return pb.InspectResponse(
        arena_id=arena.arena_id, num_blocks=arena.num_blocks, free=counts.free, reserved=counts.reserved,
        sealed=counts.sealed, cached=counts.cached, quarantine=counts.quarantine,
        holders=[_holder_info(holder) for holder in moment.holders],
        blocks=[_block_info(i, block) for i, block in enumerate(moment.blocks)],
        block_size=arena.layout.block_size, block_bytes=arena.block_bytes,
        memory=cast("pb.ArenaMemory", int(arena.memory)), device_uuid=arena.placement.device_uuid,
        kv_dtype=arena.layout.kv_dtype or "", disk_tier=None if disk is None else _disk_info(disk),
    )  # fmt: skip


def _disk_info(disk: DiskTier) -> pb.DiskTierInfo:
    return pb.DiskTierInfo(
        num_blocks=disk.num_blocks, capacity_blocks=disk.capacity_blocks, num_stored=disk.num_stored,
        num_restored=disk.num_restored,
    )  # fmt: skip


def _holder_info(holder: HolderView) -> pb.HolderInfo:
    return pb.HolderInfo(
        epoch=holder.epoch, name=holder.name, num_references=holder.num_references, lease_ms=holder.lease_ms,
        floor_blocks=holder.floor,
    )  # fmt: skip


def _block_info(number: int, block: BlockView) -> pb.BlockInfo:
    return pb.BlockInfo(
        block=number, generation=block.generation, state=cast("pb.BlockState", int(block.state)),
        prefix_hash=block.prefix_hash or b"", holders=block.holders,
    )  # fmt: skip
