"""Asks block stores for their numbers of blocks by state, which /metrics shows."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import grpc.aio

from common.rpc import ChannelPool
from common.trust import NO_TRUST, Trust
from protos.v1 import block_store_pb2 as pb
from protos.v1 import block_store_pb2_grpc

STATES = ("free", "reserved", "sealed", "cached", "quarantine")
TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """The numbers of blocks by state, summed over block stores, and the size of a block."""

    by_state: Mapping[str, int] = field(default_factory=dict)
    """The number of blocks in each of `STATES`. Empty if no block store has answered yet."""
    block_bytes: int = 0
    """Size of a block in bytes, or 0 if the size is unknown."""
    kv_dtype: str = ""
    block_size: int = 0


class BlockCounter:
    """A client of block stores. It keeps the last answer of each store, and uses it while the store does not answer."""

    def __init__(self, trust: Trust = NO_TRUST) -> None:
        self._trust = trust
        self._channels = ChannelPool(trust)
        self._last: dict[str, pb.InspectResponse] = {}

    async def count(self, addresses: Iterable[str]) -> BlockCounts:
        """Returns the sums over the block stores at these addresses. Forgets all other stores."""
        wanted = list(addresses)
        await self._channels.keep(wanted)
        await asyncio.gather(*map(self._ask, wanted))
        self._last = {address: self._last[address] for address in wanted if address in self._last}
        total: Counter[str] = Counter()
        for reply in self._last.values():
            total.update({state: getattr(reply, state) for state in STATES})
        sized = next((reply for reply in self._last.values() if reply.arena_id), pb.InspectResponse())
        return BlockCounts(total, sized.block_bytes, sized.kv_dtype, sized.block_size)

    async def close(self) -> None:
        await self._channels.close()

    async def _ask(self, address: str) -> None:
        with self._channels.use(address) as channel:
            stub = block_store_pb2_grpc.BlockStoreServiceStub(channel)  # type: ignore[no-untyped-call]
            try:
                self._last[address] = await stub.Inspect(
                    pb.InspectRequest(), timeout=TIMEOUT_S, metadata=self._trust.metadata
                )
            except grpc.aio.AioRpcError:
                return
