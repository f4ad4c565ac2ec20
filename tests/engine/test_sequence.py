"""Sequences and the arrays of a step."""

from __future__ import annotations

import numpy as np
import pytest

from block_store.ledger.prefix_hash import chain_start, hash_blocks, next_hash, prompt_chain
from common.types import BlockRef, CacheQuota, FinishReason, SamplingParams, StoppingParams
from engine.block_table import BlockTable
from engine.sequence import Chunk, Sequence, lay_out


def sequence(prompt: int, outputs: int = 0, computed: int = 0, blocks: int = 0, first_block: int = 10) -> Sequence:
    table = BlockTable(BlockRef(first_block + i, 100 + i) for i in range(blocks))
    result = Sequence(
        list(range(prompt)), list(range(1000, 1000 + outputs)), SamplingParams(), StoppingParams(), table=table
    )
    result.num_computed = computed
    return result


def test_worked_example_seven_tokens_in_blocks_of_four() -> None:
    """Seven prompt tokens take two blocks. The next token fills the second block, and then a third block is needed."""
    item = sequence(7, blocks=2)
    assert -(-item.num_tokens // 4) == 2
    batch = lay_out([Chunk(item, 7)], 4).batch
    assert batch.slot_mappings[0].tolist() == [40, 41, 42, 43, 44, 45, 46]
    item.num_computed = 7
    item.output_ids.append(1)
    assert item.num_computed // 4 == 1 < len(item.table)
    assert lay_out([Chunk(item, 1)], 4).batch.slot_mappings[0].tolist() == [47]
    item.num_computed = 8
    item.output_ids.append(2)
    assert item.num_full_blocks(4) == 2
    assert item.num_computed // 4 == 2 == len(item.table)


def test_a_mixed_batch() -> None:
    chunks = [Chunk(sequence(20, computed=16, blocks=2), 4), Chunk(sequence(3, 1, 3, 1, first_block=50), 1)]
    step = lay_out(chunks, 16)
    assert step.batch.token_ids.tolist() == [16, 17, 18, 19, 1000]
    assert step.batch.positions.tolist() == [16, 17, 18, 19, 3]
    assert step.batch.cu_seqlens_q.tolist() == [0, 4, 5]
    assert step.batch.context_lens.tolist() == [20, 4]
    assert step.batch.slot_mappings[0].tolist() == [176, 177, 178, 179, 803]
    assert step.batch.logits_rows.tolist() == [3, 4]
    assert step.batch.block_tables[0].tolist() == [[10, 11], [50, 50]]
    assert step.generations[0].tolist() == [[100, 101], [100, 100]]
    assert step.batch.block_tables[0].dtype == np.int32


def test_logits_are_wanted_where_a_token_is_drawn_or_prompt_logprobs_are_asked_for() -> None:
    unfinished, asked = Chunk(sequence(20, blocks=2), 8), Chunk(sequence(6, blocks=1), 4)
    asked.sequence.sampling = SamplingParams(prompt_logprobs=0)
    last = Chunk(sequence(3, blocks=1), 3)
    assert lay_out([unfinished, asked, last], 16).batch.logits_rows.tolist() == [8, 9, 10, 11, 14]


def test_generations_above_32_bits_survive_the_arrays() -> None:
    item = sequence(1, blocks=0)
    item.table = BlockTable([BlockRef(3, (7 << 32) + 5)])
    assert lay_out([Chunk(item, 1)], 16).generations[0].tolist() == [[(7 << 32) + 5]]


@pytest.mark.parametrize("start,end", [(0, 3), (3, 5), (5, 7), (2, 7), (0, 7)])
def test_tokens_between_spans_prompt_and_outputs(start: int, end: int) -> None:
    item = sequence(5, 2)
    assert item.tokens_between(start, end) == item.token_ids[start:end]


def test_hashes_extend_over_prompt_and_outputs_as_one_chain() -> None:
    start = chain_start(b"d" * 32, b"")
    item = sequence(10, 30)
    item.hashes = [start]
    item.extend_hashes(1, 8, next_hash)
    item.extend_hashes(5, 8, next_hash)
    assert item.hashes[1:] == hash_blocks(start, item.token_ids, 8)
    assert item.block_hash(4) == item.hashes[-1]


@pytest.mark.parametrize(
    "outputs,stopping,max_model_len,reason",
    [
        ([5], StoppingParams(8, 0, (5,)), 100, FinishReason.STOP),
        ([5], StoppingParams(8, 2, (5,)), 100, None),
        ([5, 5], StoppingParams(8, 2, (5,)), 100, FinishReason.STOP),
        ([1, 2], StoppingParams(2), 100, FinishReason.LENGTH),
        ([5, 5], StoppingParams(2, 0, (5,)), 100, FinishReason.STOP),
        ([1], StoppingParams(9), 4, FinishReason.LENGTH),
        ([], StoppingParams(9, 0, (0,)), 100, None),
    ],
)
def test_finish_reason(
    outputs: list[int], stopping: StoppingParams, max_model_len: int, reason: FinishReason | None
) -> None:
    item = Sequence([0, 0, 0], outputs, SamplingParams(), stopping)
    assert item.finish_reason(max_model_len) is reason


def test_sources_count_prompt_tokens_only() -> None:
    item = sequence(20, 30)
    item.num_cached = 48
    assert (item.sources().cached, item.sources().computed) == (20, 0)
    item.num_cached = 16
    assert (item.sources().cached, item.sources().computed) == (16, 4)


def test_a_block_table_reads_like_a_list() -> None:
    refs = [BlockRef(4, 1), BlockRef(9, (1 << 63) + 2), BlockRef(7, 3)]
    table = BlockTable(refs)
    assert list(table) == refs and table[1] == refs[1] and table[-1] == refs[2] and table[1:] == refs[1:]
    table[0] = BlockRef(5, 6)
    table.append(BlockRef(8, 8))
    assert (len(table), table[0], table[3]) == (4, BlockRef(5, 6), BlockRef(8, 8))
    assert all(isinstance(ref, BlockRef) for ref in table)


def test_a_fork_has_the_same_past_and_grows_by_itself() -> None:
    item = sequence(20, 3, computed=22, blocks=2)
    item.hashes, item.num_sealed, item.tail_sealed, item.num_cached = [b"start", b"one"], 1, True, 16
    fork = item.fork(3)
    assert fork.sample_index == 3 and fork.prompt_ids is item.prompt_ids
    assert (fork.token_ids, list(fork.table), fork.hashes) == (item.token_ids, list(item.table), item.hashes)
    assert (fork.num_computed, fork.num_sealed, fork.tail_sealed, fork.num_cached) == (22, 1, True, 16)
    fork.output_ids.append(7)
    fork.table[1] = BlockRef(90, 1)
    fork.table.append(BlockRef(91, 1))
    fork.hashes.append(b"two")
    assert (item.num_tokens, list(item.table), len(item.hashes)) == (23, [BlockRef(10, 100), BlockRef(11, 101)], 2)


def test_a_sequence_and_its_forks_have_the_hashes_of_its_public_beginning_and_of_its_salt() -> None:
    ids = list(range(50, 90))
    start, rekey = prompt_chain(b"d" * 32, b"salt", ids, 20, 8)
    quota = CacheQuota(b"t" * 32, 10)
    sequence = Sequence(ids, [], SamplingParams(), StoppingParams(), hashes=[start], rekey=rekey, quota=quota)
    sequence.extend_hashes(1, 8, next_hash)
    other = sequence.fork(1)
    for each in (sequence, other):
        each.extend_hashes(5, 8, next_hash)
        assert each.hashes[1:] == hash_blocks(start, ids, 8, rekey=rekey)
        assert [each.quota_of(block) for block in range(5)] == [None, None, quota, quota, quota]
    assert sequence.hashes[1:3] == hash_blocks(start, ids[:16], 8) != sequence.hashes[3:]
