"""Rows that are kept from step to step equal those of a step that is laid out from scratch."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import numpy as np
import pytest

from common.types import BlockRef, SamplingParams, StoppingParams
from engine.block_table import BlockTable
from engine.draft import Draft
from engine.rows import DecodeRows
from engine.sequence import Chunk, Sequence, Step, lay_out

BLOCK_SIZE = 4


def new_sequence(rng: random.Random) -> Sequence:
    length = rng.randrange(1, 30)
    sequence = Sequence(list(range(length)), [1000 + length], SamplingParams(), StoppingParams())
    sequence.table = BlockTable(new_ref(rng) for _ in range(length // BLOCK_SIZE + 1))
    sequence.num_computed = length
    return sequence


def new_ref(rng: random.Random) -> BlockRef:
    return BlockRef(rng.randrange(1 << 20), rng.randrange(1 << 40))


def assert_same(found: Step, wanted: Step) -> None:
    """The tables of `found` may have more columns, which repeat the first one."""
    for name in (field.name for field in fields(wanted.batch)):
        for ours, theirs in zip(arrays(getattr(found.batch, name)), arrays(getattr(wanted.batch, name)), strict=True):
            if name == "block_tables":
                assert_same_table(ours, theirs)
            else:
                assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs), name
    for ours, theirs in zip(found.generations, wanted.generations, strict=True):
        assert_same_table(ours, theirs)


def assert_same_table(found: np.ndarray, wanted: np.ndarray) -> None:
    width = wanted.shape[1]
    assert found.dtype == wanted.dtype and np.array_equal(found[:, :width], wanted)
    assert (found[:, width:] == found[:, :1]).all()


def arrays(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else (value,)


def test_steps_with_comings_and_goings_are_laid_out_as_from_scratch() -> None:
    rng = random.Random(0)
    rows, running = DecodeRows(BLOCK_SIZE), [new_sequence(rng)]
    for _ in range(300):
        assert_same(rows.lay_out(running), lay_out([Chunk(s, 1) for s in running], BLOCK_SIZE))
        for sequence in running:
            sequence.num_computed += 1
            sequence.output_ids.append(rng.randrange(1 << 16))
            if sequence.num_computed % BLOCK_SIZE == 0:
                sequence.table.append(new_ref(rng))
        changed = rng.choice(running)
        changed.table[rng.randrange(len(changed.table))] = new_ref(rng)  # a copy on write, or an earlier sealed block
        if rng.random() < 0.2:
            running.append(new_sequence(rng))
        if rng.random() < 0.2 and len(running) > 1:
            running.remove(rng.choice(running))
        if rng.random() < 0.1:
            rng.shuffle(running)
            running[0].table = running[0].table.copy()


def test_a_forked_table_is_another_one() -> None:
    rng = random.Random(1)
    parent = new_sequence(rng)
    rows = DecodeRows(BLOCK_SIZE)
    rows.lay_out([parent])
    child = parent.fork(1)
    child.table[-1] = BlockRef(7, 7)
    last = len(child.table) - 1
    assert rows.lay_out([child]).batch.block_tables[0][0, last] == 7
    assert rows.lay_out([parent]).batch.block_tables[0][0, last] == parent.table[-1].block


def test_drafts_are_laid_out_as_chunks_of_tokens_that_are_known() -> None:
    """The step of a draft is that of a sequence which already has the draft's tokens, with results for every row."""
    rng = random.Random(2)
    rows, running = DecodeRows(BLOCK_SIZE), [new_sequence(rng) for _ in range(5)]
    for _ in range(50):
        drafts, chunks = [], []
        for sequence in running:
            room = len(sequence.table) * BLOCK_SIZE - sequence.num_computed - 1
            draft = Draft(tuple(rng.randrange(1 << 16) for _ in range(rng.randrange(room + 1))))
            drafts.append(draft)
            known = replace(sequence, output_ids=[*sequence.output_ids, *draft.token_ids])
            chunks.append(Chunk(known, 1 + len(draft.token_ids)))
        found, wanted = rows.lay_out(running, drafts), lay_out(chunks, BLOCK_SIZE)
        assert np.array_equal(found.batch.logits_rows, np.arange(len(found.batch.token_ids)))
        assert_same(replace(found, batch=replace(found.batch, logits_rows=wanted.batch.logits_rows)), wanted)
        for sequence in running:
            sequence.num_computed += 1
            sequence.output_ids.append(rng.randrange(1 << 16))
            if sequence.num_computed % BLOCK_SIZE == 0:
                sequence.table.append(new_ref(rng))


def test_a_step_is_the_same_object_until_a_block_table_changes() -> None:
    """Its arrays are the same even longer: until the shape of a table changes."""
    rng, rows, running = random.Random(3), DecodeRows(BLOCK_SIZE), list[Sequence]()
    for num_blocks in (1, 2, 3):
        length = num_blocks * BLOCK_SIZE
        running.append(Sequence(list(range(length)), [1000 + length], SamplingParams(), StoppingParams()))
        running[-1].table = BlockTable(new_ref(rng) for _ in range(num_blocks + 4))
        running[-1].num_computed = length

    def next_step(sequences: list[Sequence]) -> Step:
        for sequence in sequences:
            sequence.num_computed += 1
            sequence.output_ids.append(rng.randrange(1 << 16))
        step = rows.lay_out(sequences)
        shortest = [replace(s, table=BlockTable(list(s.table)[: s.num_computed // BLOCK_SIZE + 1])) for s in sequences]
        wanted = lay_out([Chunk(s, 1) for s in shortest], BLOCK_SIZE).batch
        for name in ("token_ids", "positions", "slot_mappings", "cu_seqlens_q", "context_lens", "logits_rows"):
            assert np.array_equal(getattr(step.batch, name), getattr(wanted, name)), name
        return step

    first = rows.lay_out(running)
    assert next_step(running) is first
    assert next_step(list(running)) is first
    for _ in range(BLOCK_SIZE - 1):
        assert next_step(running) is first  # and then in other blocks
    running[1].table[0] = new_ref(rng)
    second = next_step(running)
    assert second is not first and second.batch is first.batch
    for _ in range(BLOCK_SIZE - 2):
        assert next_step(running) is second
    for sequence in running:
        sequence.table.append(new_ref(rng))
    third = next_step(running)
    assert third is not second and third.batch is second.batch
    fourth = next_step(running[::-1])
    assert fourth is not third and fourth.batch is third.batch
    for sequence in running:
        for _ in range(8):
            sequence.table.append(new_ref(rng))
    assert next_step(running).batch is not third.batch  # wider tables


def test_steps_with_drafts_of_the_same_lengths_share_arrays() -> None:
    """Also if steps with other lengths come in between, or rows write to other blocks."""
    rng, rows, running = random.Random(4), DecodeRows(BLOCK_SIZE), list[Sequence]()
    for length in (4, 8):
        running.append(Sequence(list(range(length)), [1000 + length], SamplingParams(), StoppingParams()))
        running[-1].table = BlockTable(new_ref(rng) for _ in range(length // BLOCK_SIZE + 6))
        running[-1].num_computed = length

    def next_step(*lengths: int) -> Step:
        drafts = [Draft(tuple(rng.randrange(1 << 16) for _ in range(length))) for length in lengths] if lengths else []
        found = rows.lay_out(running, drafts)
        known, counts = list(running), [1 + length for length in lengths] or [1, 1]
        if drafts:
            pairs = zip(running, drafts, strict=True)
            known = [replace(s, output_ids=[*s.output_ids, *draft.token_ids]) for s, draft in pairs]
        wanted = lay_out([Chunk(s, count) for s, count in zip(known, counts, strict=True)], BLOCK_SIZE).batch
        for name in ("token_ids", "positions", "slot_mappings", "cu_seqlens_q", "context_lens"):
            assert np.array_equal(getattr(found.batch, name), getattr(wanted, name)), name
        assert found.batch.logits_rows.tolist() == list(range(sum(counts)))
        for sequence, count in zip(running, counts, strict=True):
            new = rng.randrange(1, count + 1)
            sequence.num_computed += new
            sequence.output_ids += [rng.randrange(1 << 16) for _ in range(new)]
        return found

    kinds: list[tuple[int, ...]] = [(1, 0), (0, 1), (3, 2), ()]
    firsts = [next_step(*kind) for kind in kinds]
    for _ in range(2):
        assert [next_step(*kind) for kind in kinds] == firsts  # compares by identity


def test_a_step_needs_a_block_for_each_row() -> None:
    rng, rows = random.Random(5), DecodeRows(BLOCK_SIZE)
    sequence = Sequence([1, 2], [3], SamplingParams(), StoppingParams(), num_computed=2)
    sequence.table.append(new_ref(rng))
    rows.lay_out([sequence], [Draft((4,))])
    with pytest.raises(ValueError, match="no block"):
        rows.lay_out([sequence], [Draft((4, 5))])
    sequence.num_computed = 4
    with pytest.raises(ValueError, match="no block"):
        rows.lay_out([sequence])
    sequence.table.append(new_ref(rng))
    assert rows.lay_out([sequence]).batch.positions.tolist() == [4]
