"""Loads and unloads the LoRA adapters that clients can choose by name, and counts the requests that use them.

The list of wanted adapters is in Redis (`AdapterRegistry`). Workers load the adapters on this list and report them in
their registry entries. Once a pair of workers has loaded an adapter, the adapter is served until it is unloaded. Calls
to Redis run in threads, one at a time, so that no answer is older than what this gateway has written.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from block_store.errors import BlockStoreError, LedgerUnavailable
from block_store.redis.adapter_registry import AdapterList, AdapterRegistry
from common.adapters import AdapterError, AdapterRef, parse_module, read_adapter
from common.errors import InvalidArgument, LooseleafError, ModelNotFound, StartupError, Unavailable
from gateway.fleet.workers import Workers

logger = logging.getLogger("adapters")
T = TypeVar("T")
LOAD_TIMEOUT_S = 60.0
_POLL_S = 0.25
_LOOK_S = 0.05


class Adapters:
    """The set of adapters that this gateway serves. It may be used only in the event loop."""

    def __init__(self, workers: Workers, registry: AdapterRegistry | None, base_name: str) -> None:
        """If `registry` is None, adapters are disabled, and no adapter is served."""
        self._workers = workers
        self._registry = registry
        self._base_name = base_name
        self._known: AdapterList | None = None
        """The list as it was last read."""
        self._served: dict[str, AdapterRef] = {}
        self._leaving: set[str] = set()
        self._loading: set[str] = set()
        """Names of adapters that `load` is loading."""
        """Names that are being unloaded."""
        self._in_use: Counter[str] = Counter()
        """Number of running and waiting requests, by digest."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()

    @property
    def is_enabled(self) -> bool:
        return self._registry is not None

    @property
    def served(self) -> list[AdapterRef]:
        """The adapters that can be chosen now, sorted by name."""
        return [self._served[name] for name in sorted(self._served)]

    def find(self, name: str) -> AdapterRef | None:
        return self._served.get(name)

    @contextmanager
    def using(self, ref: AdapterRef | None) -> Iterator[None]:
        """A context manager that makes `unload` wait while a request needs an adapter. Raises ModelNotFound if the
        adapter has been unloaded since the request was checked.
        """
        if ref is None:
            yield
            return
        if self._served.get(ref.name) != ref:
            raise ModelNotFound(f"model {ref.name!r} is no longer served")
        self._in_use[ref.digest] += 1
        try:
            yield
        finally:
            self._in_use[ref.digest] -= 1

    async def run(self) -> None:
        """Updates the served adapters from the list and the workers until cancelled. While Redis does not answer, the
        last list stays valid. Returns at once if adapters are disabled.
        """
        while self.is_enabled:
            try:
                await self._look()
            except LedgerUnavailable as error:
                logger.debug("%s", error)
            except Exception:
                logger.exception("the list of adapters could not be read")
            await asyncio.sleep(_POLL_S)

    async def begin(self, modules: Sequence[str]) -> None:
        """Loads the adapters of --lora-modules ("name=path"), and waits until all workers have loaded them, without a
        time limit. Raises StartupError if an adapter cannot be loaded; the error names the adapter.
        """
        for text in modules:
            try:
                name, path = parse_module(text)
                ref = await asyncio.to_thread(read_adapter, name, path)
                self._check_name(name)
                await self._publish(ref)
                await self._until_loaded(ref, None)
            except (AdapterError, LooseleafError, BlockStoreError) as error:
                raise StartupError(f"--lora-modules {text}: {error}") from None

    async def load(self, name: str, path: str) -> None:
        """Makes every worker load the adapter in the directory `path`, and serves it as `name`. If a worker fails to
        load the adapter, or does not load it within `LOAD_TIMEOUT_S`, the adapter is removed from the list again. If
        Redis does not answer, the call fails, and the adapter is removed from the list as soon as Redis answers.

        Raises InvalidArgument if the name or the path is invalid, if the name is in use, if adapters are disabled or if
        a worker cannot load the adapter. Raises Unavailable if another attempt may succeed.
        """
        try:
            ref = await asyncio.to_thread(read_adapter, name, path)
        except AdapterError as error:
            raise InvalidArgument.of("lora_path", f"cannot be served: {error}") from None
        self._check_name(name)
        if name in self._leaving:
            raise Unavailable(f"{name!r} is being unloaded", retry_after_s=1.0)
        if name in self._served or any(known.name == name for known in self._listed):
            raise InvalidArgument.of("lora_name", f"{name!r} is already loaded; unload it first")
        if name in self._loading:
            raise Unavailable(f"{name!r} is being loaded", retry_after_s=1.0)
        self._loading.add(name)
        try:
            await self._load(name, ref)
        finally:
            self._loading.discard(name)

    async def _load(self, name: str, ref: AdapterRef) -> None:
        try:
            await self._publish(ref)
            await self._until_loaded(ref, LOAD_TIMEOUT_S)
        except LedgerUnavailable:  # perhaps only the answer was lost, and the adapter is on the list
            self._leaving.add(name)
            task = asyncio.create_task(self._withdraw(name))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            raise Unavailable("the list of adapters cannot be written now", retry_after_s=1.0) from None
        except (LooseleafError, asyncio.CancelledError):
            await asyncio.shield(self._withdraw(name))
            raise

    async def unload(self, name: str) -> None:
        """Refuses further requests for an adapter, waits until the current requests for the adapter have ended, and
        makes the workers unload it. Raises ModelNotFound if the adapter is not served.
        """
        if (ref := self._served.pop(name, None)) is None:
            raise ModelNotFound(f"model {name[:100]!r} is not a loaded adapter")
        self._leaving.add(name)
        while self._in_use[ref.digest]:
            await asyncio.sleep(_LOOK_S)
        await self._withdraw(name)

    # --- inside

    @property
    def _listed(self) -> tuple[AdapterRef, ...]:
        return () if self._known is None else self._known.refs

    def _check_name(self, name: str) -> None:
        if name == self._base_name:
            raise InvalidArgument.of("lora_name", f"must differ from the model's name, {name!r}")

    async def _until_loaded(self, ref: AdapterRef, timeout_s: float | None) -> None:
        """Waits until all workers have loaded an adapter. Raises InvalidArgument if a worker cannot load it, and
        Unavailable after `timeout_s` (None means no limit).
        """
        began = time.monotonic()
        while True:
            states = self._workers.adapter_states(ref.digest)
            if (problem := next(filter(None, states), None)) is not None:
                raise InvalidArgument.of("lora_path", f"cannot be served: {problem}")
            if self._served.get(ref.name) == ref and None not in states:
                return
            if timeout_s is not None and time.monotonic() - began > timeout_s:
                raise Unavailable(f"not all workers loaded the adapter within {timeout_s:g} s", retry_after_s=1.0)
            await asyncio.sleep(_LOOK_S)

    async def _look(self) -> None:
        async with self._turn:
            found = await self._call(lambda registry: registry.list())
            if self._known is not None and (found is None or found.life != self._known.life or found.damaged):
                found = await self._call(partial(_repair, self._known, found))
            self._take(found)

    def _take(self, found: AdapterList | None) -> None:
        self._known = found or self._known
        listed = {ref.name: ref for ref in self._listed}
        self._served = {name: ref for name, ref in self._served.items() if listed.get(name) == ref}
        for name, ref in listed.items():
            if name not in self._leaving and self._workers.have_adapter(ref.digest):
                self._served[name] = ref

    async def _publish(self, ref: AdapterRef) -> None:
        async with self._turn:
            await self._call(lambda registry: registry.publish([ref]))

    async def _withdraw(self, name: str) -> None:
        """Removes an adapter from the list. Retries until Redis answers."""
        self._served.pop(name, None)
        while True:
            try:
                async with self._turn:
                    await self._call(lambda registry: registry.withdraw(name))
                    self._take(await self._call(lambda registry: registry.list()))
                    self._leaving.discard(name)
                    return
            except LedgerUnavailable:
                await asyncio.sleep(_POLL_S)

    async def _call(self, call: Callable[[AdapterRegistry], T]) -> T:
        if self._registry is None:
            raise InvalidArgument.of("lora_name", "cannot be used: the server runs without --enable-lora")
        return await asyncio.to_thread(call, self._registry)


def _repair(known: AdapterList, found: AdapterList | None, registry: AdapterRegistry) -> AdapterList | None:
    """Publishes again the adapters of the list `known` whose entries have been lost or are damaged in Redis. Removes
    the damaged entries of other adapters. Returns the list as it is afterwards.
    """
    is_lost = found is None or found.life != known.life
    there = set() if found is None else {ref.name for ref in found.refs}
    damaged = () if found is None else found.damaged
    registry.publish([ref for ref in known.refs if ref.name not in there and (is_lost or ref.name in damaged)])
    for name in set(damaged) - {ref.name for ref in known.refs}:
        registry.withdraw(name)
    return registry.list()
