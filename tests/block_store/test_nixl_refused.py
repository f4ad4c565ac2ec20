"""What a store says where NIXL is not installed or not asked for. `test_nixl` tests transfers."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from block_store.transfer.nixl_agent import NixlAgent
from block_store.transfer.nixl_process import PACKAGES
from common import convert
from common.errors import StartupError
from protos.v1 import block_store_pb2 as pb
from testing.ledger.hosts import Host
from testing.ledger.store import chain


async def test_without_the_package_a_store_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in PACKAGES:  # so that the test is the same where NIXL is installed
        (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('none', name={package!r})")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(StartupError, match=r"^NIXL cannot be used: NIXL is not installed: pip install"):
        async with NixlAgent():
            pytest.fail("an agent without NIXL has started")


def test_a_store_without_an_agent_does_not_say_where_its_blocks_are(shm: Path) -> None:
    host = Host(shm / "a", 4)
    blocks, _ = host.fill(chain("plain", 2))
    ticket = host.hand_over([[blocks]])
    request = pb.LocateBlocksRequest(
        arena_id=ticket.arena_id, table=convert.table_to_pb(blocks), ticket_epoch=ticket.id.epoch,
        ticket_secret=ticket.id.secret,
    )  # fmt: skip
    with pytest.raises(grpc.RpcError) as found:
        host.stub.LocateBlocks(request, timeout=60)
    assert found.value.code() is grpc.StatusCode.FAILED_PRECONDITION and "--transport nixl" in found.value.details()
    host.stop()
