"""The decode role of a worker's process. `python -m decode_svc` runs only this role, and `looseleaf.both_roles` runs
both.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from block_store.holder.attach import Attached, Needs, attach
from common.rpc import RpcServer
from common.service_main import wait_idle, worker_name
from common.speculative_config import SpeculativeConfig
from common.telemetry import Fallbacks
from common.tracing import tracer_of
from common.trust import trust_of
from common.types import KvLayout
from decode_svc.draft_policy import DraftLimits, DraftPolicy
from decode_svc.model_speculation import CHUNKS, ModelSpeculation
from decode_svc.ngram import NgramDrafter
from decode_svc.outputs import Rejection
from decode_svc.preemption import Preemption
from decode_svc.scheduler import DecodeScheduler
from decode_svc.service import DecodeServicer
from decode_svc.settings import DecodeSettings
from decode_svc.speculation import Speculation
from decode_svc.swap import SwapSpace
from decode_svc.worker import DecodeWorker
from engine import start_up
from engine.draft_model import DraftModel, draft_path, load_draft_model, num_draft_blocks
from engine.model_runner import ModelRunner
from protos.v1 import decode_pb2_grpc
from worker.adapters import pool_of
from worker.fair_lock import AnyFairLock, FairFileLock
from worker.grammars import grammars_of
from worker.ranks import bind_ranks, end_with_ranks
from worker.role import WorkerRole, domain_of, least_floor, record_of

logger = logging.getLogger("decode")
COMMAND_S = 5.0
"""Maximum time in seconds that a drain waits for the step thread to run a command."""


def needs_of(
    runner: ModelRunner, settings: DecodeSettings, worker_id: str, draft_runner: ModelRunner | None = None
) -> Needs:
    """Measures the role's CUDA graphs and the activations of its largest step, and returns the role's requirements for
    the arena. They include the memory of a draft model.
    """
    weights_bytes = runner.weights_bytes
    peak_bytes = start_up.profile(runner, max_rows(settings), max_rows(settings), graphs=True)
    if draft_runner is not None:
        weights_bytes += draft_runner.weights_bytes
        peak_bytes += start_up.profile(draft_runner, CHUNKS[0], settings.max_num_seqs)
        peak_bytes += draft_blocks(draft_runner, settings) * draft_runner.layout.block_bytes
    return Needs(
        worker_id,
        "decode",
        runner.layout,
        weights_bytes,
        peak_bytes,
        runner.max_model_len,
        floor_blocks=least_floor("decode", runner, settings),
        reserve_blocks=settings.reserve_blocks,
        device=str(runner.device.torch_device),
    )


def max_rows(settings: DecodeSettings) -> int:
    """Returns the maximum number of rows of a step. Drafts use the rows that sequences leave free, so speculation
    increases this number only if the longest draft of a single sequence needs more rows.
    """
    if settings.speculative_config is None:
        return settings.max_num_seqs
    return max(settings.max_num_seqs, 1 + SpeculativeConfig.parse(settings.speculative_config).num_speculative_tokens)


def draft_runner_of(
    runner: ModelRunner, settings: DecodeSettings, loaded: ModelRunner | None = None
) -> ModelRunner | None:
    """Loads the draft model that the settings request, or returns None if they request none, or the target does not
    allow speculation. If `loaded` is that draft model, returns it instead. Raises ModelError (`load_draft_model`).
    """
    if settings.speculative_config is None or runner.layout.has_states:
        return None
    model = SpeculativeConfig.parse(settings.speculative_config).model
    if model is None:
        return None
    if loaded is not None and loaded.settings.model == draft_path(model):
        return loaded
    return load_draft_model(model, runner)


def draft_blocks(draft_runner: ModelRunner, settings: DecodeSettings) -> int:
    """Returns the number of blocks of the draft model's cache."""
    max_bytes = SpeculativeConfig.parse(settings.speculative_config or "").kv_space_bytes
    return num_draft_blocks(draft_runner, settings.max_num_seqs, max_bytes)


def speculation_of(
    layout: KvLayout, max_model_len: int, settings: DecodeSettings, draft_runner: ModelRunner | None = None
) -> DraftPolicy | None:
    """Returns the speculation that the settings request, or None if they request none or the model does not allow any.
    In the latter case, logs the reason. `draft_runner` is the result of `draft_runner_of`.
    """
    if settings.speculative_config is None:
        return None
    if layout.has_states:
        Fallbacks(logger).note("no speculation", "a recurrent state cannot be set back by rejected tokens")
        return None
    config = SpeculativeConfig.parse(settings.speculative_config)
    limits = DraftLimits(config.num_speculative_tokens, max_rows(settings), layout.block_size, max_model_len)
    if config.method == "draft_model":
        assert draft_runner is not None
        model = DraftModel(draft_runner, draft_blocks(draft_runner, settings))
        size = model.num_free * draft_runner.layout.block_bytes / 2**20
        logger.info("speculation: %d tokens, draft model %s, KV %.1f MiB", limits.num_tokens, config.model, size)
        return ModelSpeculation(model, limits)
    logger.info(
        "speculation: %d tokens, n-grams of %d to %d tokens", limits.num_tokens, config.shortest, config.longest
    )
    return Speculation(NgramDrafter(config.longest, config.shortest), limits)


def join(runner: ModelRunner, settings: DecodeSettings, loaded: ModelRunner | None = None) -> DecodeRole:
    """Attaches a loaded model to the block store, which may wait for other workers. Returns the role. `loaded` is a
    draft model that has already been loaded, or None.
    """
    draft_runner = draft_runner_of(runner, settings, loaded)
    needs = needs_of(runner, settings, worker_name("decode", settings.worker_id), draft_runner)
    [attached] = attach(settings.block_store, [needs], trust_of(settings))
    turns = FairFileLock(settings.turns_file) if settings.turns_file is not None else None
    return DecodeRole(runner, needs, attached, settings, turns, draft_runner)


class DecodeRole(WorkerRole):
    """The decode role of a worker's process, with its model, blocks, running batch, step thread and gRPC service."""

    def __init__(
        self,
        runner: ModelRunner,
        needs: Needs,
        attached: Attached,
        settings: DecodeSettings,
        turns: AnyFairLock | None = None,
        draft_runner: ModelRunner | None = None,
    ) -> None:
        bind_ranks(runner, attached)
        start_up.capture(runner, max_rows(settings))
        scheduler = DecodeScheduler(max_num_seqs=settings.max_num_seqs, max_queue=settings.max_queue)
        swap_bytes = 0 if settings.preemption == "give-back" else int(settings.swap_space * 2**30)
        preemption = Preemption(scheduler, SwapSpace(runner, attached, swap_bytes), settings.preemption)
        parts = (preemption, speculation_of(runner.layout, runner.max_model_len, settings, draft_runner))
        self._worker = worker = DecodeWorker(runner, attached, scheduler, domain_of(runner), *parts)
        record = record_of(needs, attached, runner, settings)
        adapters = pool_of(runner)
        super().__init__(attached, record, worker.step, lambda: worker.load, turns, adapters)
        end_with_ranks(runner, self.thread)
        vocab_size = runner.config.vocab_size
        grammars = grammars_of(settings.model, vocab_size)
        grammars.warm()
        self._tracer = tracer_of("decode", needs.worker_id)
        self._servicer = DecodeServicer(worker, self.thread, vocab_size, (grammars, adapters), self._tracer)

    def add_to(self, server: RpcServer) -> None:
        add = decode_pb2_grpc.add_DecodeServiceServicer_to_server
        server.add(add, self._servicer, "looseleaf.v1.DecodeService")

    async def drain(self, timeout_s: float) -> None:
        await self._ended(self._worker.start_draining)
        await wait_idle(self._is_busy, timeout_s)
        await self._ended(lambda: self._worker.reject_all(Rejection.DRAINING))
        await asyncio.sleep(0.1)  # until the rejections have been sent

    async def _ended(self, command: Callable[[], None]) -> None:
        """Posts a command to the step thread. Waits until it has run, but at most COMMAND_S."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def run() -> None:
            command()
            loop.call_soon_threadsafe(ended.set)

        self.thread.post(run)
        with suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), COMMAND_S)

    def _is_busy(self) -> bool:
        load = self._worker.load
        return load.num_running + load.num_waiting + load.num_preempted > 0

    def close(self, timeout_s: float) -> None:
        super().close(timeout_s)
        self._tracer.close()
