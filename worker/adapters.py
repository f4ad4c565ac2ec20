"""Loads and drops the LoRA adapters of a worker's process. The roles of a process share the adapters. A sequence has a
reference to its adapter, so a dropped adapter stays in memory until its last sequence ends. Adapters are not loaded in
the step thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from functools import cache

from block_store.errors import LedgerUnavailable
from block_store.redis.adapter_registry import AdapterList
from common.adapters import AdapterError, AdapterRef
from common.errors import Aborted
from engine.lora import LoraAdapter, LoraModel
from engine.model_runner import ModelRunner

logger = logging.getLogger("adapters")
POLL_S = 0.5
ReadList = Callable[[], AdapterList | None]


class AdapterPool:
    """A pool of one model's loaded adapters, by digest."""

    def __init__(self, model: LoraModel | None, max_loras: int) -> None:
        """Creates an empty pool. If `model` is None, adapters are not enabled."""
        self._model = model
        self._max_loras = max_loras
        self._full_reason = f"--max-loras {max_loras} adapters are already loaded"
        self._loaded: dict[str, LoraAdapter] = {}
        self._problems: dict[str, str] = {}
        self._lock = threading.Lock()

    @property
    def is_enabled(self) -> bool:
        return self._model is not None

    def get(self, digest: bytes) -> LoraAdapter | None:
        """Returns the adapter with this digest, or None if the digest is empty, which means the base model. Raises
        Aborted if the adapter is not loaded; another worker may have loaded it.
        """
        if not digest:
            return None
        if (adapter := self._loaded.get(digest.hex())) is None:
            raise Aborted("the request's adapter is not loaded here")
        return adapter

    def status(self) -> Mapping[str, str]:
        """Returns the status of each adapter that is loaded or could not be loaded, by digest: "" if it is loaded, or
        the reason why it cannot be loaded.
        """
        return {**dict.fromkeys(list(self._loaded), ""), **self._problems}

    def follow(self, wanted: AdapterList | None) -> None:
        """Drops the adapters that are not in the list, and loads the adapters in the list, except adapters that have
        failed to load. An adapter that failed because too many were loaded is tried again when there is room. Does
        nothing if adapters are not enabled, or if the list is lost (None) or damaged, because a gateway will write it
        again.
        """
        if self._model is None or wanted is None or wanted.damaged:
            return
        with self._lock:
            refs = {ref.digest: ref for ref in wanted.refs}
            self._loaded = {digest: found for digest, found in self._loaded.items() if digest in refs}
            has_room = len(self._loaded) < self._max_loras
            self._problems = {
                digest: why
                for digest, why in self._problems.items()
                if digest in refs and not (has_room and why == self._full_reason)
            }
            for digest, ref in refs.items():
                if digest not in self._loaded and digest not in self._problems:
                    self._load(self._model, ref)

    def _load(self, model: LoraModel, ref: AdapterRef) -> None:
        try:
            if len(self._loaded) >= self._max_loras:
                raise AdapterError(self._full_reason)
            adapter = model.load(ref)
        except AdapterError as error:
            logger.error("adapter %s cannot be loaded: %s", ref.name, error)
            self._problems = {**self._problems, ref.digest: str(error)}
        except Exception as error:  # such as torch.OutOfMemoryError: the other adapters must still be loaded
            logger.exception("adapter %s cannot be loaded", ref.name)
            self._problems = {**self._problems, ref.digest: f"{type(error).__name__}: {error}"}
        else:
            logger.info("adapter %s is loaded: %.1f MB", ref.name, adapter.weights.num_bytes / 1e6)
            self._loaded = {**self._loaded, ref.digest: adapter}


@cache
def _pool_of(model: LoraModel | None, max_loras: int) -> AdapterPool:
    return AdapterPool(model, max_loras)


def pool_of(runner: ModelRunner) -> AdapterPool:
    """Returns the process's adapter pool for a runner's model."""
    return _pool_of(runner.lora, runner.settings.max_loras)


class AdapterThread:
    """A thread that keeps a pool up to date until `stop` is called."""

    def __init__(self, pool: AdapterPool, read: ReadList) -> None:
        """Prepares the thread. `read` returns the list of wanted adapters, and may raise LedgerUnavailable."""
        self._pool = pool
        self._read = read
        self._stop = threading.Event()

    def start(self) -> None:
        """Loads the adapters in the list, and then starts the thread. Does nothing if adapters are not enabled."""
        if self._pool.is_enabled:
            self._look()
            threading.Thread(target=self._run, name="adapters", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            self._look()

    def _look(self) -> None:
        try:
            self._pool.follow(self._read())
        except LedgerUnavailable as error:
            logger.debug("the list of adapters cannot be read: %s", error)
        except Exception:
            logger.exception("the adapters could not be brought up to date")
