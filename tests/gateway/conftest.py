"""Fixtures: the parts of a gateway with scripted workers, on real sockets."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from block_store.redis.redis_server import RedisHandle, connect
from common import convert
from common.api_keys import ApiKeys
from common.trust import Trust
from common.types import WorkerRecord
from gateway.admission.admission import Admission
from gateway.admission.gate import Gate
from gateway.admission.tenants import Tenants
from gateway.api.chat_plan import ChatPlanner
from gateway.api.credentials import Authenticator
from gateway.api.front import Front
from gateway.fleet.adapters import Adapters
from gateway.fleet.block_catalog import Arenas
from gateway.fleet.block_feed import BlockFeed
from gateway.fleet.liveness import LivenessLimits
from gateway.fleet.workers import Workers
from gateway.intake.assets import ModelAssets
from gateway.intake.salts import Salts
from gateway.intake.tokenizing import TokenizerPool
from gateway.intake.validate import Validator
from gateway.metrics import Metrics
from gateway.request.explanations import Explanations
from gateway.request.request_runner import RequestRunner
from testing.gateway.parts import Script, make_assets
from testing.gateway.scripted_workers import ScriptedWorker
from testing.ledger.store import patient


@dataclass
class Rig:
    """The parts of a gateway, with the scripted workers that it knows."""

    assets: ModelAssets
    workers: Workers
    admission: Admission
    validator: Validator
    metrics: Metrics
    runner: RequestRunner
    script: Script
    scripted: list[ScriptedWorker]
    authenticator: Authenticator
    gate: Gate
    feed: BlockFeed
    records: list[WorkerRecord]
    """The workers that the registry names."""

    @property
    def front(self) -> Front:
        planner, adapters = ChatPlanner(self.assets), Adapters(self.workers, None, self.assets.name)
        pipeline = (self.admission, self.validator, self.runner, self.metrics)
        return Front(self.assets, self.authenticator, *pipeline, planner, adapters)

    def metric(self, line_start: str) -> float:
        """Returns the sum of all samples whose line starts with `line_start`."""
        lines = self.metrics.render().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(line_start))


MakeRig = Callable[..., Awaitable[Rig]]


@pytest.fixture(scope="session")
def assets() -> ModelAssets:
    return make_assets()


@pytest.fixture(scope="module")
def redis_handle() -> Iterator[RedisHandle]:
    """A real Redis."""
    with tempfile.TemporaryDirectory(prefix="gw") as directory:
        handle = connect(None, directory, confined=False)
        patient(handle.client)
        yield handle
        handle.close()


@pytest.fixture
async def make_rig(assets: ModelAssets) -> AsyncIterator[MakeRig]:
    rigs: list[tuple[Rig, asyncio.Task[None], TokenizerPool]] = []

    async def make(
        script: Script | None = None,
        *,
        num_decode: int = 1,
        max_queue: int = 64,
        api_key: str | None = None,
        keys: ApiKeys | None = None,
        **options: Any,
    ) -> Rig:
        script = script or Script()
        secret = options.pop("secret", None)
        """The secret of the workers. The gateway sends `shown`, which is the same by default."""
        longest = options.pop("max_model_len", 512)
        scripted = [ScriptedWorker("prefill", "p0", script, secret, max_model_len=longest)]
        floors = options.pop("floors", [0] * num_decode)
        scripted += [
            ScriptedWorker("decode", f"d{i}", script, secret, max_group_blocks=floors[i], max_model_len=longest)
            for i in range(num_decode)
        ]
        records = [await worker.start() for worker in scripted]
        workers = Workers(
            LivenessLimits(options.pop("silence_s", 60.0), options.pop("stall_s", 60.0)),
            Trust(options.pop("shown", secret)),
            options.pop("restarts_file", None),
            await_workers=options.pop("await_workers", False),
        )
        metrics = Metrics("tiny")
        gate = Gate(workers.gate_capacity)
        pool, salts = TokenizerPool(assets, 1), Salts(b"secret")
        feed = BlockFeed(options.pop("arenas", Arenas), lambda tenant: salts.derive(tenant, None))
        validator = Validator(
            assets,
            pool,
            salts,
            timeout_s=options.pop("timeout_s", 20.0),
            max_model_len=lambda: longest,
            group_rooms=lambda: workers.group_rooms,
        )
        keys = ApiKeys({} if api_key is None else {api_key: "default"}) if keys is None else keys
        tenants = Tenants(keys.limits, time.monotonic())
        admission = Admission(max_queue, options.pop("max_queue_wait", 10.0), gate, tenants, metrics.refused)
        runner = RequestRunner(
            workers,
            gate,
            assets.tokenizer,
            metrics,
            max_attempts=3,
            recover_s=options.pop("recover_s", 20.0),
            used=admission.used,
            computed=feed.computed,
            explanations=Explanations(options.pop("explain_requests", 100)),
        )

        async def announce() -> None:
            while True:
                load = convert.load_from_pb(script.load)
                workers.on_records([replace(r, load=load) if r.role == "decode" else r for r in records])
                gate.wake()
                await asyncio.sleep(0.05)

        task = asyncio.create_task(announce())
        rig = Rig(
            assets,
            workers,
            admission,
            validator,
            metrics,
            runner,
            script,
            scripted,
            Authenticator(keys.tenants),
            gate,
            feed,
            records,
        )
        rigs.append((rig, task, pool))
        async with asyncio.timeout(60):
            while not workers.ready:
                await asyncio.sleep(0.01)
        return rig

    yield make
    for rig, task, pool in rigs:
        task.cancel()
        await rig.workers.close()
        pool.close()
        for worker in rig.scripted:
            await worker.stop()
