"""The registry of live workers and block stores. They publish records in Redis regularly, and gateways list the fresh
records.

Timestamps come from Redis' `TIME`, so the clocks of different machines are not compared. An unreadable entry is skipped
and counted, and is removed when it is old. Calls block; make them in a thread.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, TypeVar

import redis
from pydantic import AfterValidator, TypeAdapter, ValidationError

from block_store.errors import LedgerUnavailable
from common.telemetry import Fallbacks
from common.types import WorkerRecord

FRESH_S = 3.0
R = TypeVar("R")
_LOG = logging.getLogger(__name__)

# Deletes the key if its value is not a hash.
_HASH_ONLY = """
local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'hash' and kind ~= 'none' then redis.call('DEL', KEYS[1]) end
"""
_PUBLISH = f"""{_HASH_ONLY}
local time = redis.call('TIME')
local stamp = time[1] .. string.format('%03d', math.floor(time[2] / 1000))
redis.call('HSETNX', KEYS[1], '#life', stamp .. ' ' .. ARGV[1])
return redis.call('HSET', KEYS[1], ARGV[1], stamp .. ' ' .. ARGV[2])
"""
# Returns the registry's incarnation, and then the fresh values. Values older than a minute are removed. A value without
# a stamp, or with a stamp more than a minute ahead, gets a new stamp, so that it ages like other values. Its first 200
# bytes are kept for inspection.
_LIST = f"""{_HASH_ONLY}
local time, all = redis.call('TIME'), redis.call('HGETALL', KEYS[1])
local fresh = {{ redis.call('HGET', KEYS[1], '#life') or '' }}
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for i = 1, #all, 2 do
  local stamp, value = string.match(all[i + 1], '^(%d+) (.*)$')
  if all[i] ~= '#life' then
    if not stamp or stamp - now > 60000 then
      stamp, value = string.format('%.0f', now), string.sub(all[i + 1], 1, 200)
      redis.call('HSET', KEYS[1], all[i], stamp .. ' ' .. value)
    end
    if now - stamp <= tonumber(ARGV[1]) then fresh[#fresh + 1] = value
    elseif now - stamp > 60000 then redis.call('HDEL', KEYS[1], all[i]) end
  end
end
return fresh
"""


@dataclass(frozen=True, slots=True)
class StoreRecord:
    """A block store's record, with which a gateway can reach the store and open its ledger."""

    arena_id: str
    address: str
    """host:port of the store's gRPC server."""
    dataset: str
    run_id: str
    directory: str
    num_blocks: int
    block_size: int
    pulls: bool = False
    """Whether the store copies blocks from other hosts' stores."""


class WorkerRegistry:
    """A client of the records under one namespace of one Redis. All methods can raise LedgerUnavailable."""

    def __init__(self, client: redis.Redis, namespace: str = "looseleaf") -> None:
        self._client = client
        self._workers = f"{namespace}:workers"
        self._stores = f"{namespace}:stores"
        self._publish = client.register_script(_PUBLISH)
        self._list = client.register_script(_LIST)
        self.fallbacks = Fallbacks(_LOG)
        self.incarnation = b""
        """Incarnation of the workers' registry at the last `list`. If a later `list` changes it, Redis has lost the
        records in between.
        """

    def publish(self, record: WorkerRecord) -> None:
        """Adds a worker's record or renews it. Call it every second."""
        self._run(self._publish, self._workers, record.worker_id, json.dumps(asdict(record)))

    def withdraw(self, worker_id: str) -> None:
        """Removes a worker's record."""
        self._remove(self._workers, worker_id)

    def list(self, fresh_s: float = FRESH_S) -> list[WorkerRecord]:
        """Returns the records that workers have published within the last `fresh_s` seconds, sorted by worker id."""
        self.incarnation, *found = self._run(self._list, self._workers, round(fresh_s * 1000))
        return sorted(self._read(_WORKER, found), key=lambda record: record.worker_id)

    def publish_store(self, record: StoreRecord) -> None:
        self._run(self._publish, self._stores, record.arena_id, json.dumps(asdict(record)))

    def withdraw_store(self, arena_id: str) -> None:
        self._remove(self._stores, arena_id)

    def get_store(self, arena_id: str | None = None, fresh_s: float = FRESH_S) -> StoreRecord | None:
        """Returns the record of the store with `arena_id` or, if `arena_id` is None, of the store with the lowest arena
        id. Returns None if there is no such record from the last `fresh_s` seconds.
        """
        return next((record for record in self.list_stores(fresh_s) if arena_id in (None, record.arena_id)), None)

    def list_stores(self, fresh_s: float = FRESH_S) -> Sequence[StoreRecord]:
        """Returns the records that stores have published within the last `fresh_s` seconds, sorted by arena id."""
        _, *found = self._run(self._list, self._stores, round(fresh_s * 1000))
        return sorted(self._read(_STORE, found), key=lambda record: record.arena_id)

    def _read(self, kind: TypeAdapter[R], found: Iterable[bytes]) -> Iterable[R]:
        for text in found:
            try:
                yield kind.validate_json(text, strict=True)
            except ValidationError as error:
                self.fallbacks.note("registry entry skipped", f"{text[:100]!r}: {error.errors()[0]['msg']}")

    def _run(self, script: Any, key: str, *args: str | int) -> Any:
        try:
            return script(keys=[key], args=args)
        except redis.RedisError as error:
            raise LedgerUnavailable(f"registry: {error}") from error

    def _remove(self, key: str, field: str) -> None:
        try:
            self._client.hdel(key, field)
        except redis.RedisError as error:
            raise LedgerUnavailable(f"registry: {error}") from error


def _usable(record: WorkerRecord) -> WorkerRecord:
    """Returns `record`. Raises ValueError if its hash domain is not hexadecimal, or if one of its sizes is not
    positive.
    """
    bytes.fromhex(record.hash_domain)
    if min(record.block_size, record.max_model_len, record.max_num_seqs) < 1:
        raise ValueError("block_size, max_model_len and max_num_seqs must be positive")
    return record


_WORKER = TypeAdapter(Annotated[WorkerRecord, AfterValidator(_usable)])
_STORE = TypeAdapter(StoreRecord)
