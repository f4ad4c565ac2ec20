"""Asks block stores for the states of all their blocks, for clients that watch them. A store is asked for its states
only while a client watches. Clients share the answers, so more clients do not cause more calls for states. A slow store
is asked less often.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import grpc.aio

from common.errors import NotFound, Unavailable
from common.rpc import ChannelPool
from common.status import error_of
from common.trust import NO_TRUST, Trust
from gateway.fleet.stores import Stores
from protos.v1 import block_store_pb2 as pb
from protos.v1 import block_store_pb2_grpc

MIN_INTERVAL_S = 0.1
BUSY_SHARE = 0.1
"""The largest share of the time that a store spends on reading states for this gateway."""
TIMEOUT_S = 5.0


class _Store:
    """The last answer of one store, with the time from which the store may be asked for its states again, and a lock
    that admits one request for them at a time.
    """

    def __init__(self) -> None:
        self.last = pb.InspectResponse()
        self.next_at = 0.0
        self.turn = asyncio.Lock()


class BlockMaps:
    """A client of block stores that reads the states, counts and records of their blocks."""

    def __init__(self, stores: Stores, address: str | None, trust: Trust = NO_TRUST) -> None:
        """`address` is the only store to ask. If it is None, the stores of all arenas are asked."""
        self._stores = stores
        self._address = address
        self._trust = trust
        self._channels = ChannelPool(trust)
        self._by_address: dict[str, _Store] = {}

    @property
    def addresses(self) -> list[str]:
        return sorted(self._stores.addresses) if self._address is None else [self._address]

    async def states(self, index: int) -> pb.InspectResponse:
        """Returns the counts, holders and states of a store, at most `MIN_INTERVAL_S` old unless the store is slow.
        `index` is the store's place in `addresses`. Raises NotFound if there is no such store, and Unavailable if the
        store does not answer.
        """
        address = self._at(index)
        store = self._by_address.setdefault(address, _Store())
        async with store.turn:
            if (began := time.monotonic()) >= store.next_at:
                store.last = await self._ask(address, pb.InspectRequest(include_states=True))
                took_s = time.monotonic() - began
                store.next_at = began + max(MIN_INTERVAL_S, took_s / BUSY_SHARE)
        return store.last

    async def counts(self, index: int) -> pb.InspectResponse:
        """Returns the counts and holders of a store. Raises the errors of `states`."""
        return await self._ask(self._at(index), pb.InspectRequest())

    async def blocks(self, index: int, numbers: Sequence[int]) -> pb.InspectResponse:
        """Returns the ledger's records of the blocks with these numbers in a store's arena. Raises the errors of
        `states`, and InvalidArgument for invalid numbers.
        """
        return await self._ask(self._at(index), pb.InspectRequest(blocks=numbers))

    async def close(self) -> None:
        await self._channels.close()

    def _at(self, index: int) -> str:
        addresses = self.addresses
        if not 0 <= index < len(addresses):
            raise NotFound(f"there is no arena {index}; there are {len(addresses)}")
        return addresses[index]

    async def _ask(self, address: str, request: pb.InspectRequest) -> pb.InspectResponse:
        await self._channels.keep(self.addresses)
        with self._channels.use(address) as channel:
            stub = block_store_pb2_grpc.BlockStoreServiceStub(channel)  # type: ignore[no-untyped-call]
            try:
                reply: pb.InspectResponse = await stub.Inspect(
                    request, timeout=TIMEOUT_S, metadata=self._trust.metadata
                )
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                    raise error_of(error) from None
                raise Unavailable("the block store does not answer", retry_after_s=1.0) from None
        return reply
