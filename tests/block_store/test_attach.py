"""A worker that is fenced, and what the registry says of it meanwhile."""

from __future__ import annotations

import threading

from block_store.holder.attach import Attached, Needs
from block_store.redis.redis_server import RedisHandle
from block_store.redis.registry import WorkerRegistry
from common.types import WorkerLoad, WorkerRecord
from testing.ledger.store import LAYOUT, TestStore, wait_until


def attached(store: TestStore, redis_handle: RedisHandle, name: str) -> Attached:
    return Attached(store.arena, redis_handle.url, Needs(name, "decode", LAYOUT, 0, 0, 64, floor_blocks=8))


def test_a_fenced_worker_is_not_advertised_until_it_has_registered_again(
    store: TestStore, redis_handle: RedisHandle
) -> None:
    """Its floor does not fit while its successor lives, and gateways must not send it requests meanwhile."""
    fenced, registry = attached(store, redis_handle, "fenced"), WorkerRegistry(redis_handle.client)

    def is_listed() -> bool:
        return "fenced" in [record.worker_id for record in registry.list()]

    record = WorkerRecord("fenced", "decode", "127.0.0.1:1", "tiny", store.arena.arena_id, 16, "00", "00", 64, 8)
    fenced.announce(record, WorkerLoad)
    wait_until(is_listed)
    store.ledger.reap()
    store.expire(fenced.held.epoch)
    wait_until(lambda: store.ledger.reap() and fenced.is_fenced)
    successor = attached(store, redis_handle, "successor")
    renewing = threading.Thread(target=fenced.renew)
    renewing.start()
    wait_until(lambda: not is_listed())
    successor.close()
    renewing.join()
    wait_until(is_listed)
    fenced.withdraw()
    fenced.close()
