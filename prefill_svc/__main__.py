"""Starts a prefill worker: `python -m prefill_svc --model DIR --block-store HOST:PORT`. Builds what it needs."""

from __future__ import annotations

import asyncio
import sys

from block_store.attach import Attached, Needs
from block_store.hashing import hash_domain
from common.rpc import RpcServer, reachable_address, wait_for_signal, write_ready_file
from common.service_main import run_service, worker_name
from common.step_thread import StepThread
from common.types import WorkerRecord
from engine.runner import ModelRunner, RunnerSettings
from prefill_svc.scheduler import PrefillScheduler
from prefill_svc.service import PrefillServicer
from prefill_svc.settings import PrefillSettings
from prefill_svc.worker import PrefillWorker
from protos.v1 import prefill_pb2_grpc


def build_runner(settings: PrefillSettings) -> tuple[ModelRunner, int]:
    """The model, and the measured peak of activations of its largest step in bytes."""
    runner = ModelRunner(RunnerSettings.of(settings))
    return runner, runner.profile(settings.max_num_batched_tokens, settings.max_num_seqs)


async def main(settings: PrefillSettings) -> None:
    stop = asyncio.Event()
    server = RpcServer(settings.host, settings.port)
    server.bind()
    runner, peak = await asyncio.to_thread(build_runner, settings)
    name = worker_name("prefill", settings.worker_id)
    # With a floor of one maximal prompt the head of the queue always gets its blocks in the end.
    floor = sum(group.max_blocks(runner.max_model_len, settings.block_size) for group in runner.layout.groups)
    needs = Needs(name, "prefill", runner.layout, runner.weights_bytes, peak, runner.max_model_len, floor_blocks=floor)
    attached = await asyncio.to_thread(Attached.to_store, settings.block_store, needs)
    runner.bind(attached.arena.data)
    domain = hash_domain(bytes.fromhex(runner.model_fingerprint), 0, runner.layout.fingerprint, runner.numerics)
    scheduler = PrefillScheduler(
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        max_queue=settings.max_queue,
    )
    worker = PrefillWorker(runner, attached, scheduler, domain)
    loop = asyncio.get_running_loop()
    thread = StepThread(worker.step, lambda: loop.call_soon_threadsafe(stop.set))
    servicer = PrefillServicer(worker, thread, runner.max_model_len, runner.config.vocab_size)
    server.add(prefill_pb2_grpc.add_PrefillServiceServicer_to_server, servicer, "looseleaf.v1.PrefillService")
    thread.start()
    await server.start()
    record = WorkerRecord(
        name,
        "prefill",
        settings.advertise or reachable_address(settings.host, server.port),
        settings.model,
        attached.arena.arena_id,
        settings.block_size,
        domain.hex(),
        domain.hex(),
        runner.max_model_len,
        settings.max_num_seqs,
    )
    await asyncio.to_thread(attached.announce, record, lambda: worker.load)
    await server.set_ready(True)
    write_ready_file(settings.ready_file, [f"{settings.host}:{server.port}"])
    failed = await wait_for_signal(stop)
    servicer.draining = True
    await asyncio.to_thread(attached.withdraw)
    await server.stop(0.0 if failed else settings.drain_s)
    if await asyncio.to_thread(thread.stop, settings.drain_s):
        # Otherwise the lease runs out, and its blocks wait for the writer slot's lock.
        await asyncio.to_thread(attached.close)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    run_service("prefill_svc", PrefillSettings, main)
