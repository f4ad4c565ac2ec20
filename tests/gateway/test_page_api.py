"""What the page shows of workers and blocks, and to whom; and the page's files. The block stores are real."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.api_keys import ApiKeys, TenantLimits
from gateway.admission.tenants import Tenants
from gateway.api import http_fleet
from gateway.api.http_fleet import FleetView
from gateway.api.http_options import HttpOptions
from gateway.fleet.block_maps import BlockMaps
from testing.ledger.hosts import Host
from testing.ledger.store import chain
from tests.gateway.conftest import Rig
from tests.gateway.http_served import serve as serve  # a fixture

KEYS = ApiKeys({"kt": "tenant", "ko": "ops"}, {"tenant": TenantLimits(), "ops": TenantLimits(operator=1)})
NUM_BLOCKS = 24


@pytest.fixture
def host() -> Iterator[Host]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="ll-test-") as directory:
        made = Host(Path(directory) / "a", NUM_BLOCKS)
        yield made
        made.stop()


def view_of(host: Host) -> Any:
    """Returns a function that makes the view of a rig's workers and of this store's blocks."""
    tenants = Tenants(KEYS.limits, 0.0)

    def make(rig: Rig) -> FleetView:
        return FleetView(rig.workers, BlockMaps(rig.workers.stores, host.store.address), tenants.is_operator)

    return make


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_only_operators_see_hashes_and_holders(serve: Any, host: Host) -> None:
    served = await serve(keys=KEYS, view=view_of(host))
    host.fill(chain("a", 3))
    for path in ("/v1/workers", "/v1/blocks", "/v1/blocks/0"):
        assert (await served.client.get(path)).status_code == 401
    sees = {}
    for key in ("kt", "ko"):
        blocks = [(await served.client.get(f"/v1/blocks/{n}", headers=bearer(key))).json() for n in range(NUM_BLOCKS)]
        found = (await served.client.get("/v1/workers", headers=bearer(key))).json()
        assert {worker["worker_id"] for worker in found["workers"]} == {"p0", "d0"}
        assert found["arenas"][0]["counts"]["sealed"] == 3
        assert sum(block["state"] == "sealed" and block["num_holders"] == 1 for block in blocks) == 3
        sees[key] = {
            "holders" in found["arenas"][0],
            *("prefix_hash" in block or "holders" in block for block in blocks),
        }
    assert sees == {"kt": {False}, "ko": {True}}
    beyond = await served.client.get(f"/v1/blocks/{NUM_BLOCKS}", headers=bearer("ko"))
    assert beyond.status_code == 400 and beyond.json()["error"]["param"] == "block"
    assert beyond.json()["error"]["message"].startswith(f"block must be below {NUM_BLOCKS}")
    for path, status in (("/v1/blocks/x", 400), ("/v1/blocks/0?arena=1", 404), ("/v1/blocks?arena=1", 404)):
        assert (await served.client.get(path, headers=bearer("ko"))).status_code == status


async def test_a_store_that_does_not_answer_does_not_hide_the_other_arenas(serve: Any, host: Host) -> None:
    stores: Any = SimpleNamespace(addresses={"127.0.0.1:1", host.store.address})
    served = await serve(view=lambda rig: FleetView(rig.workers, BlockMaps(stores, None), lambda tenant: True))
    reply = await served.client.get("/v1/workers")
    assert reply.status_code == 200 and len(reply.json()["workers"]) == 2
    silent, other = sorted(reply.json()["arenas"], key=lambda arena: arena["num_blocks"])
    assert (silent["arena_id"], other["num_blocks"]) == ("", NUM_BLOCKS)


async def test_a_watcher_gets_all_states_and_then_the_changes(
    serve: Any, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_fleet, "MOST_WATCHERS", 1)
    served = await serve(view=view_of(host))
    states, num_events = [0] * NUM_BLOCKS, 0
    async with asyncio.timeout(60), served.client.stream("GET", "/v1/blocks") as reply:
        assert (await served.client.get("/v1/blocks")).status_code == 429, "there is one watcher already"
        async for line in reply.aiter_lines():
            if not line:
                continue
            event = json.loads(line.removeprefix("data: "))
            num_events += 1
            if num_events == 1:
                states = list(base64.b64decode(event["states"]))
                assert states == [1] * NUM_BLOCKS and event["counts"]["free"] == NUM_BLOCKS
                await asyncio.to_thread(host.fill, chain("a", 5), partial=True)
            for block, state in zip(event.get("changed", ()), event.get("to", ()), strict=True):
                states[block] = state
            if states.count(3) == 6:
                break
    assert num_events > 1 and event["counts"]["sealed"] == 6


async def test_a_watcher_whose_key_is_revoked_gets_no_more(serve: Any, host: Host) -> None:
    served = await serve(keys=KEYS, view=view_of(host))
    async with asyncio.timeout(60), served.client.stream("GET", "/v1/blocks", headers=bearer("kt")) as reply:
        events = (json.loads(line.removeprefix("data: ")) async for line in reply.aiter_lines() if line)
        assert "states" in await anext(events)
        served.rig.authenticator.replace({"ko": "ops"})
        [*_, last] = [event async for event in events]
    assert last["error"]["code"] == "invalid_api_key"


async def test_head_of_a_stream_of_blocks_ends(serve: Any, host: Host) -> None:
    served = await serve(view=view_of(host))
    reply = await served.client.head("/v1/blocks", timeout=10)
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream")


async def test_a_large_arena_is_sampled(serve: Any, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_fleet, "MOST_CELLS", 10)
    served = await serve(view=view_of(host))
    async with served.client.stream("GET", "/v1/blocks") as reply:
        event = json.loads((await anext(reply.aiter_lines())).removeprefix("data: "))
    assert event["stride"] == 3 and len(base64.b64decode(event["states"])) == NUM_BLOCKS / 3


async def test_the_page_loads_only_its_own_files_and_has_no_inline_code(serve: Any) -> None:
    served = await serve(api_key="s3cret")
    reply = await served.client.get("/")
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/html")
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=|https?://", reply.text)
    files = {*re.findall(r'(?:src|href)="([^"]+)"', reply.text)}
    seen: set[str] = set()
    while files:
        path = files.pop()
        found = await served.client.get(path)
        assert found.status_code == 200 and found.headers["content-security-policy"] == policy, path
        seen.add(path)
        files |= {f"/ui/{name}" for name in re.findall(r'from "\./([^"]+)"', found.text)} - seen
    assert "/ui/block_map.js" in seen
    assert (await served.client.get("/ui/nothing.js")).status_code == 404
    assert (await served.client.get("/ui/..%2fdocs.js")).status_code == 404


async def test_the_page_can_be_switched_off(serve: Any) -> None:
    served = await serve(http=HttpOptions(page=False))
    assert [(await served.client.get(path)).status_code for path in ("/", "/ui/page.js")] == [404, 404]
