from __future__ import annotations

from pathlib import Path

import pytest

from block_store.arena.header import arena_bytes
from block_store.server.sizing import CannotSize, DeviceLimits, WorkerNeeds, available_memory, size_arena
from common.types import KvLayout, KvSpec

GIB = 1 << 30
OPT_13B = KvLayout(16, (KvSpec(num_layers=40, num_kv_heads=40, head_dim=128, dtype="float16"),))


def test_opt_13b_needs_what_the_paper_says() -> None:
    """819,200 bytes per token and 1.5625 GiB for 2,048 tokens (Kwon et al., 2023: 800 KB and 1.6 GB)."""
    assert OPT_13B.groups[0].bytes_per_token == 819_200
    assert OPT_13B.groups[0].retention.most_held(2048, 16) * OPT_13B.block_bytes == 1.5625 * GIB


def test_blocks_are_what_is_left_of_the_budget() -> None:
    needs = [WorkerNeeds(2 * GIB, GIB, 2048, 0), WorkerNeeds(2 * GIB, GIB, 2048, 128)]
    sizing = size_arena(OPT_13B, needs, DeviceLimits(16 * GIB, 64 * GIB, GIB))
    assert arena_bytes(sizing.num_blocks, OPT_13B.block_bytes) <= 9 * GIB
    assert arena_bytes(sizing.num_blocks + 2, OPT_13B.block_bytes) > 9 * GIB - (4 << 20)
    text = "\n".join(sizing.lines())
    assert "weights 4.00 GiB, activations 2.00 GiB, reserve 1.00 GiB, KV 8.98 GiB" in text
    assert "819,200 bytes per token, 13,107,200 per block of 16; 736 blocks, 11,776 tokens" in text
    assert "maximum concurrency at 2,048 tokens 5.75x" in text


def test_shared_memory_bounds_the_arena_too() -> None:
    sizing = size_arena(OPT_13B, [], DeviceLimits(64 * GIB, GIB, 0))
    assert arena_bytes(sizing.num_blocks, OPT_13B.block_bytes) <= GIB < arena_bytes(83, OPT_13B.block_bytes)


@pytest.mark.parametrize("num_blocks", [None, 100])
def test_less_than_the_floors_is_refused(num_blocks: int | None) -> None:
    needs = [WorkerNeeds(GIB, 0, 2048, 128), WorkerNeeds(GIB, 0, 2048, 0)]
    with pytest.raises(CannotSize, match=r"have (76|100) blocks but the workers need at least 128: budget 3.00 GiB"):
        size_arena(OPT_13B, needs, DeviceLimits(3 * GIB, GIB * 9, 64 << 20), num_blocks)
    with pytest.raises(CannotSize, match="0 blocks"):
        size_arena(OPT_13B, needs, DeviceLimits(GIB, GIB, 0))


def test_two_groups_share_the_blocks() -> None:
    layout = KvLayout(16, (OPT_13B.groups[0], OPT_13B.groups[0]))
    sizing = size_arena(layout, [WorkerNeeds(0, 0, 160, 0)], DeviceLimits(GIB, GIB, 0), num_blocks=40)
    assert sizing.num_tokens == 320 and sizing.max_concurrency == 2.0


def test_a_control_group_bounds_the_memory(tmp_path: Path) -> None:
    proc, group = tmp_path / "proc", tmp_path / "cgroup"
    proc.mkdir()
    group.mkdir()
    (proc / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable:    2048 kB\n")
    assert available_memory(proc, group) == 2048 * 1024
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("5\n")
    assert available_memory(proc, group) == 2048 * 1024
    (group / "memory.max").write_text("1000\n")
    assert available_memory(proc, group) == 995
    (proc / "meminfo").write_text("nothing")
    with pytest.raises(CannotSize, match="--memory-budget"):
        available_memory(proc, group)
