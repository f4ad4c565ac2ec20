"""Connects a role of a worker to the block store and the registry. A process that runs two roles attaches both. Each
role is a holder with a separate lease, floor and record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, cast

from block_store.holder.attach import Attached, Needs
from block_store.ledger.prefix_hash import hash_domain
from common.group_need import floor_of
from common.settings import WorkerSettings
from common.telemetry import count_fallbacks_of
from common.types import KvLayout, Role, WorkerLoad, WorkerRecord
from engine.foreign.row_check import check_rows
from engine.model_runner import ModelRunner, RunnerSettings
from kernels import cpu
from kernels.cpu import fallbacks
from kernels.environment import interprets_triton
from worker.adapters import AdapterPool, AdapterThread
from worker.fair_lock import AnyFairLock
from worker.step_thread import StepThread


class Model(Protocol):
    """The interface of a loaded model (`engine.model_runner.ModelRunner`)."""

    layout: KvLayout
    weights_bytes: int
    max_model_len: int
    model_fingerprint: str
    """Fingerprint in hex."""

    @property
    def numerics(self) -> str: ...


def load_model(settings: WorkerSettings) -> ModelRunner:
    """Loads the model of a worker's process, checks its rows (`check_rows`), and registers the kernels' fallback counts
    for /metrics. If Triton's attention is chosen and Triton interprets its kernels (TRITON_INTERPRET=1), the other CPU
    kernels are also Triton's, except with `--device cuda`.
    """
    count_fallbacks_of(fallbacks)
    if settings.attention_backend == "triton" and settings.device != "cuda" and interprets_triton():
        cpu.load("triton")
    runner = ModelRunner(RunnerSettings.of(settings))
    check_rows(runner)
    return runner


def least_floor(role: Role, model: Model, settings: WorkerSettings) -> int:
    """Returns the floor that a role requests: the number of blocks for one sequence of full length
    (`group_need.floor_of`).
    """
    return floor_of(role, model.max_model_len, model.layout.rules(settings.max_num_batched_tokens))


def domain_of(model: Model) -> bytes:
    """Returns the hash domain of KV group 0, which covers the model, the layout and the numerics."""
    return hash_domain(bytes.fromhex(model.model_fingerprint), 0, model.layout.fingerprint, model.numerics)


def record_of(needs: Needs, attached: Attached, model: Model, settings: WorkerSettings) -> WorkerRecord:
    """Returns the registry's record of a role, without the values that become known later or change, such as the
    address and the load.
    """
    domain = domain_of(model).hex()
    return WorkerRecord(
        needs.worker_id,
        cast(Role, needs.role),
        "",
        settings.model,
        attached.arena.arena_id,
        model.layout.block_size,
        domain,
        domain,
        model.max_model_len,
        settings.max_num_seqs,
        attached.floor_blocks,
        kv_windows=tuple(group.retention.window for group in model.layout.groups),
        prefill_step=settings.max_num_batched_tokens,
    )


class WorkerRole:
    """A role of a worker's process, with its attachment, the thread that steps it, and its entry in the registry."""

    def __init__(
        self,
        attached: Attached,
        record: WorkerRecord,
        step: Callable[[], float | None],
        load: Callable[[], WorkerLoad],
        turns: AnyFairLock | None,
        adapters: AdapterPool,
    ) -> None:
        """Creates the step thread. Roles that share `turns`, in one process or in several, take turns in stepping. If
        `turns` is None, the role steps independently.
        """
        self.thread = StepThread(step, turns)
        self.weights_bytes = attached.weights_bytes
        self._attached = attached
        attached.on_fenced = lambda: self.thread.post(lambda: None)  # wakes the thread, whose next step starts over
        self._record = record
        self._load = load
        self._on_failure: Callable[[], object] = lambda: None
        attached.adapter_status = adapters.status
        self._adapters = AdapterThread(adapters, attached.adapters.list)

    def start(self, on_failure: Callable[[], object]) -> None:
        self._on_failure = on_failure
        self.thread.start(on_failure)

    def announce(self, address: str) -> None:
        self._adapters.start()
        self._attached.announce(replace(self._record, address=address), self._load, self._on_failure)

    def withdraw(self) -> None:
        self._adapters.stop()
        self._attached.withdraw()

    def close(self, timeout_s: float) -> None:
        if self.thread.stop(timeout_s):
            # If the thread is still running, the lease expires instead, and blocks wait until the writer slot is free.
            self._attached.close()
