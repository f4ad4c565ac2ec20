"""The prefill role of a worker's process. `python -m prefill_svc` runs only this role, and `looseleaf.both_roles` runs
both.
"""

from __future__ import annotations

from block_store.holder.attach import Attached, Needs, attach
from common.rpc import RpcServer
from common.service_main import wait_idle, worker_name
from common.settings import WorkerSettings
from common.tracing import tracer_of
from common.trust import trust_of
from engine import start_up
from engine.model_runner import ModelRunner
from prefill_svc.disk_prefixes import DiskPrefixes
from prefill_svc.requests import RequestLimits
from prefill_svc.scheduler import PrefillScheduler
from prefill_svc.service import PrefillServicer
from prefill_svc.step_limit import StepLimit
from prefill_svc.worker import PrefillWorker
from protos.v1 import prefill_pb2_grpc
from worker.adapters import pool_of
from worker.fair_lock import AnyFairLock, FairFileLock
from worker.grammars import grammars_of
from worker.ranks import bind_ranks, end_with_ranks
from worker.role import WorkerRole, domain_of, least_floor, record_of


def needs_of(runner: ModelRunner, settings: WorkerSettings, worker_id: str) -> Needs:
    """Measures the activations of the role's largest step, and returns the role's requirements for the arena."""
    return Needs(
        worker_id,
        "prefill",
        runner.layout,
        runner.weights_bytes,
        start_up.profile(runner, settings.max_num_batched_tokens, settings.max_num_seqs),
        runner.max_model_len,
        floor_blocks=least_floor("prefill", runner, settings),  # so that the oldest prompt eventually gets its blocks
        device=str(runner.device.torch_device),
    )


def join(runner: ModelRunner, settings: WorkerSettings) -> PrefillRole:
    """Attaches a loaded model to the block store, which may wait for other workers. Returns the role."""
    needs = needs_of(runner, settings, worker_name("prefill", settings.worker_id))
    [attached] = attach(settings.block_store, [needs], trust_of(settings))
    turns = FairFileLock(settings.turns_file) if settings.turns_file is not None else None
    return PrefillRole(runner, needs, attached, settings, turns)


def limit_of(settings: WorkerSettings, turns: AnyFairLock | None) -> StepLimit | None:
    """Returns the limit on the duration of a step, or None if decode does not wait for prefill's steps."""
    if turns is None or settings.max_itl == 0.0:
        return None
    max_itl_s = None if settings.max_itl is None else settings.max_itl / 1e3
    return StepLimit(max_itl_s, lambda: turns.waited_s, lambda: turns.others_have_work)


class PrefillRole(WorkerRole):
    """The prefill role of a worker's process, with its model, blocks, queue, step thread and gRPC service."""

    def __init__(
        self,
        runner: ModelRunner,
        needs: Needs,
        attached: Attached,
        settings: WorkerSettings,
        turns: AnyFairLock | None = None,
    ) -> None:
        bind_ranks(runner, attached)
        scheduler = PrefillScheduler(
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_seqs=settings.max_num_seqs,
            max_queue=settings.max_queue,
            limit=limit_of(settings, turns),
        )
        worker = PrefillWorker(runner, attached, scheduler, domain_of(runner))
        record = record_of(needs, attached, runner, settings)
        adapters = pool_of(runner)
        super().__init__(attached, record, worker.step, lambda: worker.load, turns, adapters)
        end_with_ranks(runner, self.thread)
        limits = RequestLimits(runner.max_model_len, runner.config.vocab_size, settings.max_num_seqs)
        grammars = grammars_of(settings.model, runner.config.vocab_size)
        grammars.warm()
        self._disk: DiskPrefixes | None = None
        if attached.has_disk_tier:
            self._disk = DiskPrefixes(settings.block_store, trust_of(settings), runner.layout.block_size)
        self._tracer = tracer_of("prefill", needs.worker_id)
        self._servicer = PrefillServicer(worker, self.thread, limits, (grammars, adapters), self._disk, self._tracer)

    def add_to(self, server: RpcServer) -> None:
        add = prefill_pb2_grpc.add_PrefillServiceServicer_to_server
        server.add(add, self._servicer, "looseleaf.v1.PrefillService")

    async def drain(self, timeout_s: float) -> None:
        self._servicer.draining = True
        await wait_idle(lambda: self._servicer.num_calls, timeout_s)
        if self._disk is not None:
            await self._disk.close()

    def close(self, timeout_s: float) -> None:
        super().close(timeout_s)
        self._tracer.close()
