"""The list of LoRA adapters to serve, in Redis. Gateways write the list; workers load the adapters on it.

The first writer stores a random id, the *life*, with the list. If the id is missing, Redis has no list. Workers then
keep the adapters that they have loaded, and a gateway writes its adapters again. Calls block; make them in a thread.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import redis
from pydantic import TypeAdapter, ValidationError

from block_store.errors import LedgerUnavailable
from common.adapters import AdapterRef
from common.telemetry import Fallbacks

_LIFE = "#life"
_REF = TypeAdapter(AdapterRef)


@dataclass(frozen=True, slots=True)
class AdapterList:
    """A snapshot of the list of adapters."""

    life: str
    refs: tuple[AdapterRef, ...]
    damaged: tuple[str, ...] = ()
    """Names whose entries cannot be read, or contain an adapter with a different name."""


class AdapterRegistry:
    """A client of the list of adapters under one namespace of one Redis. All methods can raise LedgerUnavailable."""

    def __init__(self, client: redis.Redis, fallbacks: Fallbacks, namespace: str = "looseleaf") -> None:
        """Creates a client of the list in `namespace`. `fallbacks` counts unreadable entries."""
        self._client = client
        self._fallbacks = fallbacks
        self._key = f"{namespace}:adapters"

    def list(self) -> AdapterList | None:
        """Returns the list, sorted by name, or None if Redis does not contain the list."""
        found: dict[bytes, bytes] = self._run(lambda: self._client.hgetall(self._key))
        life = found.pop(_LIFE.encode(), None)
        refs, damaged = list[AdapterRef](), list[str]()
        for field, text in sorted(found.items()):
            name = field.decode(errors="replace")
            ref = self._read(name, text)
            damaged += [name] if ref is None else []
            refs += [] if ref is None else [ref]
        return None if life is None else AdapterList(life.decode(errors="replace"), tuple(refs), tuple(damaged))

    def publish(self, refs: Iterable[AdapterRef]) -> None:
        """Adds adapters to the list. An adapter replaces a listed adapter with the same name."""
        items = [text for ref in refs for text in (ref.name, json.dumps(asdict(ref)))]

        def write() -> None:
            self._client.hsetnx(self._key, _LIFE, secrets.token_hex(8))
            if items:
                self._client.hset(self._key, items=items)

        self._run(write)

    def withdraw(self, name: str) -> None:
        """Removes an adapter from the list."""
        self._run(lambda: self._client.hdel(self._key, name))

    def _read(self, name: str, text: bytes) -> AdapterRef | None:
        try:
            ref = _REF.validate_json(text, strict=True)
        except ValidationError as error:
            self._fallbacks.note("adapter entry skipped", f"{text[:100]!r}: {error.errors()[0]['msg']}")
            return None
        return ref if ref.name == name else None

    def _run(self, call: Any) -> Any:
        try:
            return call()
        except redis.RedisError as error:
            raise LedgerUnavailable(f"adapters: {error}") from error
