"""`looseleaf blocks [ADDRESS]`: shows the block map of a running block store, with the holders of each block.

The report does not show tenants, because a prefix hash does not reveal the tenant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import grpc
from pydantic import Field
from pydantic_settings import CliPositionalArg

from block_store import operator_file
from common.errors import Unavailable
from common.rpc import open_blocking_channel
from common.settings import Settings, settings_config
from common.status import error_of
from common.trust import NO_TRUST, Trust
from protos.v1 import block_store_pb2 as pb
from protos.v1 import block_store_pb2_grpc

_HASH_CHARS = 12
_STATES = pb.BlockState


class BlocksSettings(Settings):
    """Flags of `looseleaf blocks`, which prints a line for each block that is not free (or, with --all, for each block)
    and then the holders.
    """

    model_config = settings_config("LOOSELEAF_BLOCKS_", "looseleaf blocks")

    address: CliPositionalArg[str] = Field("127.0.0.1:50054", description="host:port of the block store's gRPC")
    all: bool = Field(False, description="also print free blocks")
    directory: Path | None = Field(
        None,
        description="the block store's directory, which contains its credentials; default: found below "
        "/dev/shm by the address",
    )
    timeout: float = Field(10.0, gt=0, description="seconds to wait for the answer")


def run(argv: Sequence[str]) -> int:
    settings = BlocksSettings.load(argv)
    found = (
        operator_file.find(settings.address) if settings.directory is None else operator_file.read(settings.directory)
    )
    trust = NO_TRUST if found is None else found.trust.read()
    for line in lines(ask(settings.address, settings.timeout, trust), settings.all):
        print(line)
    return 0


def ask(address: str, timeout_s: float, trust: Trust) -> pb.InspectResponse:
    """Returns the store's map of blocks. Raises Unavailable if the store does not answer or refuses the call."""
    with open_blocking_channel(address, trust) as channel:
        stub = cast(Any, block_store_pb2_grpc.BlockStoreServiceStub)(channel)
        request = pb.InspectRequest(include_blocks=True)
        try:
            reply: pb.InspectResponse = stub.Inspect(request, timeout=timeout_s, metadata=trust.metadata)
        except grpc.RpcError as error:
            raise Unavailable(f"the block store at {address}: {error_of(error).message}") from None
    return reply


def lines(map_: pb.InspectResponse, with_free: bool) -> Iterator[str]:
    """Yields the lines of the report, which lists free blocks only if `with_free` is set."""
    if not map_.arena_id:
        yield "no arena yet: no worker has attached"
        return
    names = {holder.epoch: holder.name for holder in map_.holders}
    yield f"{'block':>8} {'state':<10} {'generation':>20} {'hash':<{_HASH_CHARS}} holders"
    for block in map_.blocks:
        if with_free or block.state != pb.BLOCK_STATE_FREE:
            held_by = ", ".join(names.get(epoch, f"epoch {epoch}") for epoch in block.holders)
            state = _STATES.Name(block.state).removeprefix("BLOCK_STATE_")
            prefix = block.prefix_hash.hex()[:_HASH_CHARS] or "-"
            yield f"{block.block:>8} {state:<10} {block.generation:>20} {prefix:<{_HASH_CHARS}} {held_by or '-'}"
    counts = Counter({name: getattr(map_, name) for name in ("free", "reserved", "sealed", "cached", "quarantine")})
    yield f"arena {map_.arena_id}: " + ", ".join(f"{n} {name}" for name, n in counts.items()) + f" of {map_.num_blocks}"
    kind = f"of {map_.kv_dtype} keys and values" if map_.kv_dtype else "of states"
    yield f"a block: {map_.block_size} tokens {kind}, {map_.block_bytes:,} bytes"
    if map_.HasField("disk_tier"):
        disk = map_.disk_tier
        yield (
            f"on disk: {disk.num_blocks} of at most {disk.capacity_blocks} blocks; since the start, "
            f"{disk.num_stored} written and {disk.num_restored} restored"
        )
    for holder in map_.holders:
        yield (
            f"{holder.name} (epoch {holder.epoch}): {holder.num_references} blocks, floor {holder.floor_blocks}, "
            f"lease {holder.lease_ms / 1000:.1f} s"
        )
