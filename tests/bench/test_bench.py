"""The computations of the benchmarks on example tables, and a run with a watched server."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Literal

import pytest
import torch

from bench.engine import bytes_of_weights
from bench.served.server import Request, WatchedServer, send_all
from bench.served.sharing import saved_share
from bench.served.steps import StepRecord, count_tables, read
from bench.served.waste import Poll, internal_waste, utilisations
from common.types import BlockRef
from engine.block_table import BlockTable
from engine.model_runner import ModelRunner, RunnerSettings
from engine.sequence import Chunk, lay_out
from engine.tiny import make_checkpoint
from testing.engine import Batch
from testing.system import wait_for

NOTHING = StepRecord(*[0] * 13, preemption={})


def table(*blocks: int) -> BlockTable:
    return BlockTable(BlockRef(block, 1) for block in blocks)


def step(**counts: int) -> StepRecord:
    return dataclasses.replace(NOTHING, **counts)


def test_shared_blocks_count_once_and_as_full_as_the_fullest() -> None:
    assert count_tables([(table(5, 6), 20), (table(5, 7), 31)], 16) == (4, 3, 16 + 4 + 15)
    assert count_tables([(table(5, 6), 20), (table(5, 6), 18)], 16) == (4, 2, 16 + 4)
    assert count_tables([(table(3), 16)], 16) == (1, 1, 16)
    assert count_tables([], 16) == (0, 0, 0)


def test_saved_is_weighed_by_blocks_not_by_steps() -> None:
    assert saved_share([step(table_blocks=10, own_blocks=5), step(table_blocks=30, own_blocks=30)]) == 1 - 35 / 40


def test_internal_waste_and_its_theory() -> None:
    steps = [step(own_blocks=10, filled_slots=150, num_running=1, num_waiting=1, sequence_tokens=150)]
    waste, theory, mean_len = internal_waste(steps, 16)
    assert (waste, theory, mean_len) == (1 - 150 / 160, 15 / 165, 75)


def test_blocks_allocated_ahead_are_not_in_use() -> None:
    steps = [step(at_ns=10, reserve_blocks=4), step(at_ns=20, reserve_blocks=2)]
    assert utilisations([Poll(5, 14), Poll(10, 14), Poll(25, 12)], steps, 20) == [0.5, 0.5, 0.5]


def test_a_line_that_is_still_being_written_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    assert read(path) == []
    path.write_text("[1,2,3,4,5,6,7,8,9,10,11,12,13,{}]\n[1,2")
    assert [record.at_ns for record in read(path)] == [1]


def test_a_watched_server_says_what_samples_share(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "tiny", dtype=torch.bfloat16, max_position_embeddings=512)
    requests = [Request(range(10, 42), {"n": 4, "temperature": 1.0, "max_tokens": 24, "ignore_eos": True})]
    with WatchedServer(str(model), {"num_blocks": 512}) as server:
        [done] = asyncio.run(send_all(server.addresses.grpc, requests, 1))
        # the record of the last step may be written after the answer
        steps = wait_for(server.steps, lambda found: found[-1].held_blocks == 0, 60, "blocks are held")
        assert server.dispatched("prefill") == server.dispatched("decode") == 1
    assert len(done.samples) == 4
    assert all(record.held_blocks == record.own_blocks for record in steps)
    largest = max(steps, key=lambda record: record.table_blocks)
    # 32 prompt tokens are two shared blocks; the next 23 positions of each sample are two private blocks
    assert (largest.table_blocks, largest.own_blocks, largest.num_running) == (16, 10, 4)
    assert (steps[-1].num_tickets, steps[-1].ticket_blocks, steps[-1].copied_blocks) == (1, 2, 0)
    assert steps[-1].held_blocks == 0


@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_a_step_reads_the_experts_that_its_rows_choose(tmp_path: Path, impl: Literal["native", "transformers"]) -> None:
    make_checkpoint(tmp_path, "mixtral", dtype=torch.bfloat16)
    runner = ModelRunner(RunnerSettings(tmp_path, num_threads=1, device="cpu", model_impl=impl))

    def bytes_of(num_seqs: int) -> int:
        batch = Batch.of(runner, [[5 + number] for number in range(num_seqs)], 1)
        return bytes_of_weights(runner, lay_out([Chunk(each, 1) for each in batch.sequences], 16).batch)

    c, found = runner.config, [bytes_of(num_seqs) for num_seqs in (1, 2, 64)]
    expert = 3 * c.hidden_size * c.intermediate_size * 2
    assert found[-1] - found[0] == 3 * (4 - 2) * expert, "one row chooses 2, 64 rows choose all of them"
    assert found[0] <= found[1] <= found[0] + 3 * 2 * expert
    embedding = c.vocab_size * c.hidden_size * 2
    assert runner.weights_bytes - 2 * embedding < found[-1] < runner.weights_bytes
