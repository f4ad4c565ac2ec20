"""Rows that are kept from step to step equal those of a step that is laid out from scratch."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import numpy as np

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
    for name in (field.name for field in fields(wanted.batch)):
        for ours, theirs in zip(arrays(getattr(found.batch, name)), arrays(getattr(wanted.batch, name)), strict=True):
            assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs), name
    for ours, theirs in zip(found.generations, wanted.generations, strict=True):
        assert np.array_equal(ours, theirs)


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
    assert rows.lay_out([child]).batch.block_tables[0][0, -1] == 7
    assert rows.lay_out([parent]).batch.block_tables[0][0, -1] == parent.table[-1].block


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
