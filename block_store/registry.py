"""Who is there: workers and block stores publish records in Redis with every beat, gateways list the fresh ones.

Stamps are Redis `TIME`, so no clocks are compared. Knows nothing of the ledger. Plain blocking calls; call them in a
thread.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import redis

from block_store.errors import LedgerUnavailable
from common.types import WorkerLoad, WorkerRecord

FRESH_S = 3.0

_PUBLISH = """
local time = redis.call('TIME')
local stamp = time[1] .. string.format('%03d', math.floor(time[2] / 1000))
redis.call('HSETNX', KEYS[1], '#life', stamp .. ' ' .. ARGV[1])
return redis.call('HSET', KEYS[1], ARGV[1], stamp .. ' ' .. ARGV[2])
"""
# Returns the name of the registry's life, then the values that are fresh; those of a minute ago are removed.
_LIST = """
local time, all = redis.call('TIME'), redis.call('HGETALL', KEYS[1])
local fresh = { redis.call('HGET', KEYS[1], '#life') or '' }
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for i = 1, #all, 2 do
  local stamp, value = string.match(all[i + 1], '^(%d+) (.*)$')
  if all[i] == '#life' then stamp = now
  elseif now - stamp <= tonumber(ARGV[1]) then fresh[#fresh + 1] = value
  elseif now - stamp > 60000 then redis.call('HDEL', KEYS[1], all[i]) end
end
return fresh
"""


@dataclass(frozen=True, slots=True)
class StoreRecord:
    """What a block store publishes: enough to open its ledger without its arena (gateways), or to attach (workers)."""

    arena_id: str
    address: str
    """host:port of its gRPC server."""
    dataset: str
    run_id: str
    directory: str
    num_blocks: int
    block_size: int


class WorkerRegistry:
    """The records under one namespace of one Redis. Errors of all methods: LedgerUnavailable."""

    def __init__(self, client: redis.Redis, namespace: str = "looseleaf") -> None:
        self._client = client
        self._workers = f"{namespace}:workers"
        self._stores = f"{namespace}:stores"
        self._publish = client.register_script(_PUBLISH)
        self._list = client.register_script(_LIST)
        self.life = b""
        """As of the last `list`: another one than before says that Redis has forgotten in between who was there."""

    def publish(self, record: WorkerRecord) -> None:
        """Enters or renews a worker; do so with every beat."""
        self._run(self._publish, self._workers, record.worker_id, json.dumps(asdict(record)))

    def withdraw(self, worker_id: str) -> None:
        """Takes a worker out at once."""
        self._remove(self._workers, worker_id)

    def list(self, fresh_s: float = FRESH_S) -> list[WorkerRecord]:
        """Workers that published within `fresh_s`, by id."""
        self.life, *found = self._run(self._list, self._workers, round(fresh_s * 1000))
        return sorted((_worker(json.loads(text)) for text in found), key=lambda record: record.worker_id)

    def publish_store(self, record: StoreRecord) -> None:
        self._run(self._publish, self._stores, record.arena_id, json.dumps(asdict(record)))

    def withdraw_store(self, arena_id: str) -> None:
        self._remove(self._stores, arena_id)

    def get_store(self, arena_id: str | None = None, fresh_s: float = FRESH_S) -> StoreRecord | None:
        """The store of `arena_id`, or any fresh one (the first by arena id); None: there is none."""
        _, *found = self._run(self._list, self._stores, round(fresh_s * 1000))
        records = sorted((StoreRecord(**json.loads(text)) for text in found), key=lambda record: record.arena_id)
        return next((record for record in records if arena_id in (None, record.arena_id)), None)

    def _run(self, script: Any, key: str, *args: str | int) -> Any:
        try:
            return script(keys=[key], args=args)
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise LedgerUnavailable(f"registry: {error}") from error

    def _remove(self, key: str, field: str) -> None:
        try:
            self._client.hdel(key, field)
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise LedgerUnavailable(f"registry: {error}") from error


def _worker(fields: dict[str, Any]) -> WorkerRecord:
    return WorkerRecord(**{**fields, "load": WorkerLoad(**fields["load"])})
