"""Asks the block store to restore the cached prefix of a prompt from disk while the prompt waits."""

from __future__ import annotations

import logging
from typing import Any, cast

import grpc
import grpc.aio

from block_store.ledger.prefix_hash import next_hash
from common import convert
from common.rpc import ChannelPool
from common.status import error_of
from common.telemetry import Fallbacks
from common.trust import Trust
from engine.sequence import Sequence
from protos.v1 import block_store_pb2 as pb
from protos.v1 import block_store_pb2_grpc

logger = logging.getLogger("prefill")
TIMEOUT_S = 30.0
"""Maximum time in seconds that a prompt waits for its blocks, after which prefill computes them."""


class DiskPrefixes:
    """A client of the worker's block store that restores blocks from disk."""

    def __init__(self, block_store: str, trust: Trust, block_size: int) -> None:
        self._address = block_store
        self._trust = trust
        self._block_size = block_size
        self._channels = ChannelPool(trust)
        self._fallbacks = Fallbacks(logger)

    async def restore(self, sequence: Sequence) -> None:
        """Asks the store to restore the full blocks that the sequence can reuse. The sequence's hashes must contain the
        start of the chain. Returns without an error if the store refuses or does not answer in time.
        """
        if not (num_blocks := (sequence.num_tokens - 1) // self._block_size):
            return
        sequence.extend_hashes(num_blocks, self._block_size, next_hash)
        request = pb.RestoreRequest(
            prefix_hashes=sequence.hashes[1 : num_blocks + 1],
            cache_quota=None if sequence.quota is None else convert.quota_to_pb(sequence.quota),
            num_public_blocks=0 if sequence.rekey is None else sequence.rekey[0],
        )
        try:
            await self._channels.keep()
            with self._channels.use(self._address) as channel:
                stub = cast(Any, block_store_pb2_grpc.BlockStoreServiceStub)(channel)
                await stub.Restore(request, timeout=TIMEOUT_S, metadata=self._trust.metadata)
        except grpc.aio.AioRpcError as error:
            self._fallbacks.note("prefix not restored from disk", error_of(error).message)
        except OSError as error:  # a certificate's file is being replaced
            self._fallbacks.note("prefix not restored from disk", str(error))

    async def close(self) -> None:
        await self._channels.close()
