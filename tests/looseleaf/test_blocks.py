"""`looseleaf blocks` and `looseleaf fsck` on a running block store with a worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from block_store.arena.arena import Arena
from block_store.holder.held_blocks import HeldBlocks
from block_store.ledger.client import LedgerClient
from block_store.ledger.codec import SealItem
from block_store.ledger.scripts import LedgerScripts
from block_store.redis.redis_server import open_client
from looseleaf.cli import main
from testing.ledger.store import StoreProcess, chain, content, wait_until


def test_the_map_and_the_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = StoreProcess(tmp_path / "s", "--num-blocks", "8", "--expect-workers", "1")
    assert main(["blocks", store.address]) == 0 and "no arena yet" in capsys.readouterr().out
    reply = store.attach("w")
    arena = Arena.open(reply.directory)
    slot, client = arena.acquire_writer_slot(), open_client(reply.redis_url, lambda: arena.fixed.run_id, 60.0)
    held = HeldBlocks(
        LedgerClient.register(LedgerScripts.attach(client, arena), "w", writer_slot=slot.number), arena, slot
    )
    refs, hashes = held.alloc(3), chain("a", 2)
    for ref, prefix_hash in zip(refs, hashes, strict=False):
        arena.data[ref.block] = content(prefix_hash)
    held.seal([SealItem(*pair) for pair in zip(refs, hashes, strict=False)])

    assert main(["blocks", store.address]) == 0
    shown = capsys.readouterr().out
    assert f"SEALED     {refs[0].generation:>20} {hashes[0].hex()[:12]} w" in shown
    assert shown.count("RESERVED") == 1 and "FREE" not in shown
    assert "5 free, 1 reserved, 2 sealed, 0 cached, 0 quarantine of 8" in shown and "w (epoch" in shown

    assert "a block: 16 tokens of bfloat16 keys and values, 512 bytes" in shown

    check = ["fsck", reply.directory, reply.redis_url, "--digests"]
    assert main(check) == 0 and "8 blocks, 0 differences" in capsys.readouterr().out
    client.zrem(held.holder.ledger.tag + f"own:{held.epoch}", str(refs[0].block))
    assert main(check) == 1 and "I4: sides differ" in capsys.readouterr().out
    assert main([*check, "--repair"]) == 0 and "was rebuilt" in capsys.readouterr().out

    def joined() -> bool:
        held.holder.lease.probe()
        return main(check) == 0

    wait_until(joined, 10.0)  # a probe may meet a beat of the holder, and then joins only next time
    held.close()
    store.stop()
    assert main(["blocks", store.address]) == 1
