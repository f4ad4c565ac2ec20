"""A cache on disk: a launch finds the blocks of an earlier launch, regardless of how the earlier one ended."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from looseleaf import LLM
from looseleaf.results import Completion
from testing.system import assert_nothing_held, inspect, prompts, wait_for

BLOCK = 16
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 7},
    "samples": {"temperature": 1.0, "seed": 8, "n": 4},
    "beams": {"beam_width": 4},
}
PROMPTS = dict(zip(KINDS, prompts(4, seed=31, lengths=(200, 300)), strict=True))


def launch(checkpoint: Path, kv_dir: Path, **settings: Any) -> LLM:
    sizes = {"num_blocks": 1024, "max_model_len": 2048, "roles": "split"}
    return LLM(str(checkpoint), kv_disk="64MiB", kv_disk_dir=str(kv_dir), **sizes | settings)


def answers(llm: LLM) -> dict[str, Completion]:
    options = {"max_tokens": 40, "ignore_eos": True}
    return {kind: llm.client.generate(PROMPTS[kind], **KINDS[kind] | options) for kind in KINDS}


def tokens(found: dict[str, Completion]) -> dict[str, list[list[int]]]:
    return {kind: [list(sample.token_ids) for sample in answer.samples] for kind, answer in found.items()}


@pytest.mark.parametrize("end", ["stopped", "killed"])
def test_a_later_launch_computes_only_tails_and_gives_the_same_tokens(
    checkpoint: Path, tmp_path: Path, end: str
) -> None:
    with launch(checkpoint, tmp_path) as llm:
        first = answers(llm)
        block_store = llm.addresses.block_store
        if end == "killed":
            full = {bytes(b.prefix_hash) for b in inspect(block_store, include_blocks=True).blocks if b.prefix_hash}
            wait_for(lambda: inspect(block_store).disk_tier, lambda d: d.num_blocks >= len(full), 60, "not stored")
            for pid in llm.pids.values():
                os.kill(pid, signal.SIGKILL)
    with launch(checkpoint, tmp_path) as llm:
        again = answers(llm)
        assert tokens(again) == tokens(first)
        for kind, answer in again.items():
            assert first[kind].usage.cached_tokens == 0
            assert answer.usage.cached_tokens == (len(PROMPTS[kind]) - 1) // BLOCK * BLOCK
        # The second turn of a chat also finds what decode sealed.
        turn = [*PROMPTS["greedy"], *first["greedy"].token_ids, *prompts(1, seed=9, lengths=(20, 20))[0]]
        usage = llm.client.generate(turn, max_tokens=4, temperature=0.0).usage
        assert usage.cached_tokens == (len(PROMPTS["greedy"]) + 39) // BLOCK * BLOCK
        assert_nothing_held(llm.addresses.block_store)


def test_tenants_find_their_own_blocks_after_a_restart_and_no_others(checkpoint: Path, tmp_path: Path) -> None:
    prompt, cached = PROMPTS["greedy"], []
    for key in ("first-key-of-one", "first-key-of-one", "other-key-of-two"):
        keys = tmp_path / "keys"
        keys.write_text(f"{key.split('-')[0]} {key}\n")
        keys.chmod(0o600)
        with launch(checkpoint, tmp_path / "kv", api_key_file=str(keys)) as llm:
            cached.append(llm.client.generate(prompt, max_tokens=1, temperature=0.0).usage.cached_tokens)
    assert cached == [0, (len(prompt) - 1) // BLOCK * BLOCK, 0]
    assert (tmp_path / "kv" / "salt").stat().st_mode & 0o777 == 0o600


def test_blocks_come_back_after_eviction(checkpoint: Path, tmp_path: Path) -> None:
    """The arena has room for a few prompts, and the disk for all of them. A prompt's blocks are copied some time after
    the prompt; on a fast machine, later prompts might evict them before.
    """
    many = prompts(24, seed=44, lengths=(200, 300))
    with launch(checkpoint, tmp_path, num_blocks=160, max_model_len=512) as llm:
        num_full = 0

        def stored(prompt: list[int]) -> Completion:
            nonlocal num_full
            answer = llm.client.generate(prompt, max_tokens=8, temperature=0.0)
            num_full += (len(prompt) + 7) // BLOCK
            store = llm.addresses.block_store
            wait_for(lambda: inspect(store).disk_tier.num_blocks, lambda n: n >= num_full, 60, "not stored")
            return answer

        first = [stored(prompt) for prompt in many]
        again = [llm.client.generate(prompt, max_tokens=8, temperature=0.0) for prompt in many]
        assert [list(item.token_ids) for item in again] == [list(item.token_ids) for item in first]
        assert all(item.usage.computed_tokens <= BLOCK for item in again)
        disk = inspect(llm.addresses.block_store).disk_tier
        assert disk.num_restored >= sum(len(prompt) // BLOCK for prompt in many) - 160
        assert_nothing_held(llm.addresses.block_store)
