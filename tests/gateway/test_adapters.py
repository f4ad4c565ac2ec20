"""The gateway's list of adapters, with a real Redis that loses the list, and with workers whose registry entries state
the loaded adapters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from block_store.errors import LedgerUnavailable
from block_store.redis.adapter_registry import AdapterRegistry
from block_store.redis.redis_server import RedisHandle
from common.adapters import CONFIG_FILE, WEIGHTS_FILE, AdapterRef, read_adapter
from common.api_keys import read_keys
from common.errors import InvalidArgument, ModelNotFound, Unavailable
from common.telemetry import Fallbacks
from gateway.admission.tenants import Tenants
from gateway.api.http_app import HttpApi
from gateway.fleet import adapters as module
from gateway.fleet.adapters import Adapters
from gateway.intake.wanted import TextPrompt, Wanted
from tests.gateway.conftest import MakeRig, Rig
from tests.gateway.test_requests import until


@pytest.fixture
def registry(redis_handle: RedisHandle) -> AdapterRegistry:
    redis_handle.client.flushall()
    return AdapterRegistry(redis_handle.client, Fallbacks(module.logger))


@pytest.fixture
def ref(tmp_path: Path) -> AdapterRef:
    (tmp_path / CONFIG_FILE).write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    (tmp_path / WEIGHTS_FILE).write_bytes(b"weights")
    return read_adapter("sql", str(tmp_path))


def workers_say(rig: Rig, ref: AdapterRef, state: str) -> None:
    rig.records[:] = [replace(record, adapters={ref.digest: state}) for record in rig.records]


async def test_an_adapter_is_served_from_its_load_to_its_unload(
    make_rig: MakeRig, registry: AdapterRegistry, ref: AdapterRef
) -> None:
    rig = await make_rig()
    adapters = Adapters(rig.workers, registry, "tiny")
    following = asyncio.create_task(adapters.run())
    loading = asyncio.create_task(adapters.load(ref.name, ref.path))
    await until(lambda: registry.list() is not None)
    assert adapters.find("sql") is None and not loading.done()  # no worker has it yet
    workers_say(rig, ref, "")
    await loading
    assert adapters.find("sql") == ref
    with pytest.raises(InvalidArgument, match="already loaded"):
        await adapters.load(ref.name, ref.path)
    with adapters.using(ref):
        unloading = asyncio.create_task(adapters.unload("sql"))
        await until(lambda: adapters.find("sql") is None)
        await asyncio.sleep(0.5)  # two polls: the list still has it, but it is not served again
        assert adapters.find("sql") is None and not unloading.done()
    await unloading
    listed = registry.list()
    assert listed is not None and listed.refs == ()
    with pytest.raises(ModelNotFound), adapters.using(ref):
        pass
    following.cancel()


async def test_a_second_load_of_a_name_does_not_end_the_first(
    make_rig: MakeRig, registry: AdapterRegistry, ref: AdapterRef
) -> None:
    rig = await make_rig()
    adapters = Adapters(rig.workers, registry, "tiny")
    following = asyncio.create_task(adapters.run())
    loading = [asyncio.create_task(adapters.load(ref.name, ref.path)) for _ in range(2)]
    await asyncio.wait(loading, return_when=asyncio.FIRST_COMPLETED)
    workers_say(rig, ref, "")
    first, second = await asyncio.gather(*loading, return_exceptions=True)
    assert {type(first), type(second)} == {type(None), Unavailable} and "is being loaded" in f"{first}{second}"
    assert adapters.find("sql") == ref
    following.cancel()


async def test_a_request_keeps_the_adapter_that_it_was_admitted_with(make_rig: MakeRig, ref: AdapterRef) -> None:
    rig = await make_rig()
    unloaded: list[AdapterRef | None] = [ref]  # found once, then unloaded while the request is tokenized
    rig.validator.use_adapters(lambda name: unloaded.pop() if unloaded else None)
    resolved = await rig.validator.resolve(Wanted(prompt=TextPrompt("text"), model="sql"))
    assert resolved.adapter == ref


async def test_what_one_worker_cannot_load_no_worker_keeps(
    make_rig: MakeRig, registry: AdapterRegistry, ref: AdapterRef
) -> None:
    rig = await make_rig()
    workers_say(rig, ref, "the rank is 32")
    adapters = Adapters(rig.workers, registry, "tiny")
    await until(lambda: rig.workers.adapter_states(ref.digest)[0])
    with pytest.raises(InvalidArgument, match="the rank is 32"):
        await adapters.load(ref.name, ref.path)
    listed = registry.list()
    assert listed is not None and listed.refs == ()


class SilentRegistry(AdapterRegistry):
    """A registry in which an adapter is published without an answer, and withdrawn at the second try."""

    num_withdrawals = 0

    def publish(self, refs: Iterable[AdapterRef]) -> None:
        super().publish(refs)
        raise LedgerUnavailable("the answer was lost")

    def withdraw(self, name: str) -> None:
        self.num_withdrawals += 1
        if self.num_withdrawals == 1:
            raise LedgerUnavailable("still silent")
        super().withdraw(name)


async def test_what_was_listed_without_an_answer_is_not_served(
    make_rig: MakeRig, registry: AdapterRegistry, redis_handle: RedisHandle, ref: AdapterRef
) -> None:
    rig = await make_rig()
    workers_say(rig, ref, "")
    silent = SilentRegistry(redis_handle.client, Fallbacks(module.logger))
    adapters = Adapters(rig.workers, silent, "tiny")
    following = asyncio.create_task(adapters.run())
    with pytest.raises(Unavailable, match="cannot be written now"):
        await adapters.load(ref.name, ref.path)
    with pytest.raises(Unavailable, match="'sql' is being unloaded"):
        await adapters.load(ref.name, ref.path)

    def is_gone() -> bool:
        assert adapters.find("sql") is None
        listed = registry.list()
        return listed is not None and listed.refs == ()

    await until(is_gone)
    assert silent.num_withdrawals == 2
    following.cancel()


@pytest.mark.parametrize("damage", ["flushall", "entry"])
async def test_a_list_that_redis_loses_is_written_again(
    make_rig: MakeRig, registry: AdapterRegistry, redis_handle: RedisHandle, ref: AdapterRef, damage: str
) -> None:
    rig = await make_rig()
    workers_say(rig, ref, "")
    adapters = Adapters(rig.workers, registry, "tiny")
    following = asyncio.create_task(adapters.run())
    await adapters.load(ref.name, ref.path)
    if damage == "flushall":
        redis_handle.client.flushall()
    else:
        redis_handle.client.hset("looseleaf:adapters", "sql", "garbage")
        redis_handle.client.hset("looseleaf:adapters", "unknown", "garbage")

    def is_whole() -> bool:
        listed = registry.list()
        return listed is not None and listed.refs == (ref,) and not listed.damaged

    await until(is_whole)
    assert adapters.find("sql") == ref
    following.cancel()


async def test_only_the_operators_keys_change_what_is_served(make_rig: MakeRig, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("ops ops-key operator=1\nacme acme-key\n")
    file.chmod(0o600)
    keys = read_keys(None, str(file))
    rig = await make_rig(keys=keys)
    is_operator = Tenants(keys.limits, 0.0).is_operator
    app = HttpApi(rig.front).app(lambda: True, show_metrics=False, timeout_s=20.0, is_operator=is_operator)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        for key, status in (("ops-key", 400), ("acme-key", 403), ("wrong", 401)):
            headers = {"authorization": f"Bearer {key}"}
            body = {"lora_name": "sql", "lora_path": "/nowhere"}
            assert (await client.post("/v1/load_lora_adapter", json=body, headers=headers)).status_code == status
        off = HttpApi(rig.front).app(lambda: True, show_metrics=False, timeout_s=20.0)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(off), base_url="http://gateway") as client:
        assert (await client.post("/v1/load_lora_adapter", json=body)).status_code == 404
