"""The decode role in a process. `python -m decode_svc` hosts it alone, `looseleaf.both_roles` together with prefill."""

from __future__ import annotations

import asyncio

from block_store.holder.attach import Attached, Needs, attach
from common.rpc import RpcServer
from common.service_main import wait_idle, worker_name
from common.trust import trust_of
from decode_svc.outputs import Rejection
from decode_svc.preemption import Preemption
from decode_svc.scheduler import DecodeScheduler
from decode_svc.service import DecodeServicer
from decode_svc.settings import DecodeSettings
from decode_svc.swap import SwapSpace
from decode_svc.worker import DecodeWorker
from engine import start_up
from engine.model_runner import ModelRunner
from protos.v1 import decode_pb2_grpc
from worker.adapters import pool_of
from worker.fair_lock import AnyFairLock, FairFileLock
from worker.grammars import grammars_of
from worker.ranks import bind_ranks, end_with_ranks
from worker.role import WorkerRole, domain_of, least_floor, record_of


def needs_of(runner: ModelRunner, settings: DecodeSettings, worker_id: str) -> Needs:
    """Returns the role's requirements for the arena. Measures the role's CUDA graphs and the activations of its largest
    step.
    """
    return Needs(
        worker_id,
        "decode",
        runner.layout,
        runner.weights_bytes,
        start_up.profile(runner, settings.max_num_seqs, settings.max_num_seqs, graphs=True),
        runner.max_model_len,
        floor_blocks=least_floor("decode", runner, settings),
        reserve_blocks=settings.reserve_blocks,
        device=str(runner.device.torch_device),
    )


def join(runner: ModelRunner, settings: DecodeSettings) -> DecodeRole:
    """Attaches a loaded model to the block store and returns the role. Waits until all expected workers attach."""
    needs = needs_of(runner, settings, worker_name("decode", settings.worker_id))
    [attached] = attach(settings.block_store, [needs], trust_of(settings))
    turns = FairFileLock(settings.turns_file) if settings.turns_file is not None else None
    return DecodeRole(runner, needs, attached, settings, turns)


class DecodeRole(WorkerRole):
    """The decode role of a worker's process: its model, blocks, running batch, step thread and gRPC service."""

    def __init__(
        self,
        runner: ModelRunner,
        needs: Needs,
        attached: Attached,
        settings: DecodeSettings,
        turns: AnyFairLock | None = None,
    ) -> None:
        bind_ranks(runner, attached)
        start_up.capture(runner, settings.max_num_seqs)
        scheduler = DecodeScheduler(max_num_seqs=settings.max_num_seqs, max_queue=settings.max_queue)
        swap_bytes = 0 if settings.preemption == "give-back" else int(settings.swap_space * 2**30)
        preemption = Preemption(scheduler, SwapSpace(runner, attached, swap_bytes), settings.preemption)
        self._worker = worker = DecodeWorker(runner, attached, scheduler, domain_of(runner), preemption)
        record = record_of(needs, attached, runner, settings)
        adapters = pool_of(runner)
        super().__init__(attached, record, worker.step, lambda: worker.load, turns, adapters)
        end_with_ranks(runner, self.thread)
        vocab_size = runner.config.vocab_size
        grammars = grammars_of(settings.model, vocab_size)
        grammars.warm()
        self._servicer = DecodeServicer(worker, self.thread, vocab_size, (grammars, adapters))

    def add_to(self, server: RpcServer) -> None:
        add = decode_pb2_grpc.add_DecodeServiceServicer_to_server
        server.add(add, self._servicer, "looseleaf.v1.DecodeService")

    async def drain(self, timeout_s: float) -> None:
        self.thread.post(self._worker.start_draining)
        await wait_idle(self._is_busy, timeout_s)
        self.thread.post(lambda: self._worker.reject_all(Rejection.DRAINING))
        await asyncio.sleep(0.1)  # the step thread sends them

    def _is_busy(self) -> bool:
        load = self._worker.load
        return load.num_running + load.num_waiting + load.num_preempted > 0
