"""Starts a decode worker: `python -m decode_svc --model DIR --block-store HOST:PORT`. Builds what it needs."""

from __future__ import annotations

import asyncio
import sys

from block_store.attach import Attached, Needs
from block_store.hashing import hash_domain
from common.rpc import RpcServer, reachable_address, wait_for_signal, write_ready_file
from common.service_main import run_service, worker_name
from common.step_thread import StepThread
from common.types import WorkerRecord
from decode_svc.scheduler import DecodeScheduler
from decode_svc.service import DecodeServicer
from decode_svc.settings import DecodeSettings
from decode_svc.worker import DecodeWorker, Rejection
from engine.runner import ModelRunner, RunnerSettings
from protos.v1 import decode_pb2_grpc


def build_runner(settings: DecodeSettings) -> tuple[ModelRunner, int]:
    """The model, and the measured peak of activations of its largest step in bytes."""
    runner = ModelRunner(RunnerSettings.of(settings))
    return runner, runner.profile(settings.max_num_seqs, settings.max_num_seqs)


async def main(settings: DecodeSettings) -> None:
    stop = asyncio.Event()
    server = RpcServer(settings.host, settings.port)
    server.bind()
    runner, peak = await asyncio.to_thread(build_runner, settings)
    name = worker_name("decode", settings.worker_id)
    floor = sum(group.max_blocks(runner.max_model_len, settings.block_size) for group in runner.layout.groups)
    needs = Needs(
        name,
        "decode",
        runner.layout,
        runner.weights_bytes,
        peak,
        runner.max_model_len,
        floor_blocks=floor + 1,  # copy-on-write holds a source beside its copy for one step
        reserve_blocks=settings.reserve_blocks,
    )
    attached = await asyncio.to_thread(Attached.to_store, settings.block_store, needs)
    runner.bind(attached.arena.data)
    domain = hash_domain(bytes.fromhex(runner.model_fingerprint), 0, runner.layout.fingerprint, runner.numerics)
    scheduler = DecodeScheduler(max_num_seqs=settings.max_num_seqs, max_queue=settings.max_queue)
    worker = DecodeWorker(runner, attached, scheduler, domain)
    loop = asyncio.get_running_loop()
    thread = StepThread(worker.step, lambda: loop.call_soon_threadsafe(stop.set))
    servicer = DecodeServicer(worker, thread)
    server.add(decode_pb2_grpc.add_DecodeServiceServicer_to_server, servicer, "looseleaf.v1.DecodeService")
    thread.start()
    await server.start()
    record = WorkerRecord(
        name,
        "decode",
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
    await asyncio.to_thread(attached.withdraw)
    if not failed:
        await drain(worker, thread, settings.drain_s)
    await server.stop(grace_s=0.5)
    if await asyncio.to_thread(thread.stop, settings.drain_s):
        # Otherwise the lease runs out, and its blocks wait for the writer slot's lock.
        await asyncio.to_thread(attached.close)
    if failed:
        sys.exit(1)


async def drain(worker: DecodeWorker, thread: StepThread, timeout_s: float) -> None:
    """Refuse new groups, let running ones finish for a while, send the rest back to their gateways."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    thread.post(worker.start_draining)
    while asyncio.get_running_loop().time() < deadline and (worker.load.num_running or worker.load.num_waiting):
        await asyncio.sleep(0.05)
    thread.post(lambda: worker.reject_all(Rejection.DRAINING))
    await asyncio.sleep(0.1)


if __name__ == "__main__":
    run_service("decode_svc", DecodeSettings, main)
