"""The division of layers into groups of equal size, and block tables that drop blocks outside the window."""

from __future__ import annotations

import random

import numpy as np
import pytest

from common.group_need import GroupNeed, floor_of
from common.kv_retention import KvRules, Retention
from common.types import BlockRef, KvKind, KvLayout, KvSpec, SamplingParams, StoppingParams
from engine.block_table import BlockTable
from engine.kv_groups import LayerGroup, LayerMemory, cut, layout_of
from engine.sequence import Sequence

FULL = KvSpec(1, 1, 8, "bfloat16")


def windowed(window: int) -> KvSpec:
    return KvSpec(1, 1, 8, "bfloat16", KvKind.SLIDING, window)


def refs(count: int, first: int = 100) -> list[BlockRef]:
    return [BlockRef(first + i, 1000 + i) for i in range(count)]


def test_layers_that_attend_alike_are_one_group() -> None:
    assert cut(dict.fromkeys(range(12))) == (12, (LayerGroup(None, tuple(range(12))),))
    assert cut(dict.fromkeys(range(3), 64)) == (3, (LayerGroup(64, (0, 1, 2)),))


def test_gemma_3_has_one_full_group_and_six_with_a_window() -> None:
    windows = {layer: None if layer % 6 == 5 else 512 for layer in range(26)}
    places, groups = cut(windows)
    assert places == 4 and [group.window for group in groups] == [None] + [512] * 6
    assert groups[0].layers == (5, 11, 17, 23)
    assert [len(group.layers) for group in groups] == [4, 4, 4, 4, 4, 4, 2], "two places of the last one stay empty"
    assert sorted(layer for group in groups for layer in group.layers) == list(range(26))


def test_kinds_of_almost_equal_number_are_padded_rather_than_split() -> None:
    places, groups = cut(dict(enumerate([None, 8] * 5 + [8])))
    assert places == 6 and [len(group.layers) for group in groups] == [5, 6]


def test_as_many_states_share_a_block_as_fit_beside_keys_and_values() -> None:
    attends, state = LayerMemory(), LayerMemory(attends=False, state_bytes=640)
    layout, groups = layout_of([attends, state, state, attends, state], 2, 8, "bfloat16", 16)
    assert layout.block_bytes == 2 * 2 * 2 * 8 * 2 * 16 == 2048, "two layers of keys and values; three states fit"
    assert [(group.layers, group.has_states) for group in groups] == [((0, 3), False), ((1, 2, 4), True)]
    assert layout.groups[1] == KvSpec(3, 0, 0, "bfloat16", KvKind.STATE, state_bytes=640)
    small, parts = layout_of([attends, state, state], 2, 8, "bfloat16", 4)
    assert [group.layers for group in parts] == [(0,), (1,), (2,)] and small.block_bytes == 640
    alone, _ = layout_of([state] * 3, 1, 8, "bfloat16", 16)
    assert alone.block_bytes == 3 * 640 and len(alone.groups) == 1
    both, parts = layout_of([LayerMemory(state_bytes=64)] * 2, 2, 8, "bfloat16", 16)
    assert [group.layers for group in parts] == [(0, 1), (0, 1)] and len(both.groups) == 2


def test_states_keep_their_format_beside_keys_and_values_of_8_bits() -> None:
    layers = [LayerMemory(), LayerMemory(attends=False, state_bytes=640)]
    layout, _ = layout_of(layers, 2, 8, "int8", 16)
    attends, state = layout.groups
    assert attends.bytes_per_token == 2 * 2 * (8 + 4), "eight integers and a scale"
    assert state.block_bytes(16) == 640 and layout.kv_dtype == "int8"
    assert layout.fingerprint != layout_of(layers, 2, 8, "float8_e4m3fn", 16)[0].fingerprint


def test_a_state_is_needed_where_it_stands_and_nowhere_else() -> None:
    spec = KvSpec(1, 0, 0, "bfloat16", KvKind.STATE, state_bytes=64)
    assert spec.bytes_per_token == 0 and spec.block_bytes(16) == spec.block_bytes(32) == 64
    kept = spec.retention
    assert kept.slides and [kept.first_needed(n, 16) for n in (0, 1, 15, 16, 17, 32, 33)] == [0, 0, 0, 0, 1, 1, 2]
    assert all(kept.num_needed(n, 16) == 1 for n in range(1, 100))


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 33, 1024])
def test_what_is_needed_is_what_later_positions_read(window: int) -> None:
    spec, size = windowed(window).retention, 16
    for num_computed in (*range(100), 1023, 1024, 1025, 4096, 5000):
        first = spec.first_needed(num_computed, size)
        oldest = max(0, num_computed - window + 1)  # the first position that the next one reads
        last = max(0, -(-num_computed // size) - 1)
        assert first == min(oldest // size, last)
        assert spec.num_needed(num_computed, size) == -(-num_computed // size) - first <= -(-(window - 1) // size) + 1
    assert FULL.retention.first_needed(5000, size) == 0 and not FULL.retention.slides


@pytest.mark.parametrize("window", [None, 1, 2, 15, 16, 17, 18, 40])
@pytest.mark.parametrize("step", [1, 2, 15, 16, 17, 40])
def test_the_most_that_is_held_is_what_a_sequence_holds_at_some_time(window: int | None, step: int) -> None:
    """This holds however a sequence is divided into steps. Decode, with steps of 1, releases blocks only when it has
    filled one.
    """
    kept, size, rng = Retention(window), 16, random.Random(step)
    for num_tokens in (1, 16, 17, 50, 400):
        most = 0
        for _ in range(60):
            position = released_at = 0
            while position < num_tokens:
                end = min(num_tokens, position + rng.choice((step, rng.randint(1, step))))
                most = max(most, -(-end // size) - kept.first_needed(released_at, size))
                position = end
                if step > 1 or position % size == 0:
                    released_at = position
        assert most <= kept.most_held(num_tokens, size, step)
    assert most == kept.most_held(400, size, step), "no less is enough"


def test_floors_count_what_is_held_at_a_time() -> None:
    """The models are Gemma 3 1B at 32,768 tokens, Mamba, and a model with full attention."""
    gemma = KvRules(16, (Retention(), *[Retention(512)] * 6), prefill_step=512)
    assert floor_of("prefill", 32768, gemma) == 2048 + 6 * (64 + 1), "511 positions that 512 read"
    assert floor_of("decode", 32768, gemma) == 2048 + 6 * (33 + 32) + 7, "copies too"
    assert floor_of("decode", 32768, KvRules(256, (Retention(1),), 512)) == 2 + 2 + 1
    for step in (0, 512):
        assert floor_of("prefill", 2048, KvRules(16, prefill_step=step)) == 128
        assert floor_of("decode", 2048, KvRules(16, prefill_step=step)) == 129


@pytest.mark.parametrize("width", [1, 2, 8])
def test_samples_in_a_window_need_no_more_than_with_full_attention(width: int) -> None:
    for prompt_len, max_tokens in ((5, 300), (300, 5), (200, 200)):
        need = GroupNeed(prompt_len, max_tokens, width)
        full, windowed = need.blocks(KvRules(16)), need.blocks(KvRules(16, (Retention(40),), 32))
        assert windowed <= full and windowed <= width * (4 + 1) + 2
    assert GroupNeed(3200, 5, 8).blocks(KvRules(16, (Retention(40),))) == 4 + 8 * 2, "they share the prompt's blocks"


def test_a_table_drops_its_head_and_keeps_its_places() -> None:
    given = refs(6)
    table, stamp = BlockTable(given), 0
    other = table.copy()
    assert table.drop(0) == [] and table.live == given
    assert table.drop(3) == given[:3]
    assert table.live == given[3:] and len(table) == 6 and table.first == 3 and table.stamp > stamp
    assert table[4] == given[4] and [table[i] for i in range(3)] == [given[3]] * 3
    assert table.drop(2) == [] and table.drop(5) == given[3:5] and table.live == given[5:]
    blocks, generations = np.zeros(6, np.int32), np.zeros(6, np.uint64)
    table.copy_to(blocks, generations)
    assert blocks.tolist() == [105] * 6 and generations.tolist() == [1005] * 6, "every entry may be checked"
    table[-1] = BlockRef(8, 8)
    assert list(table) == [BlockRef(8, 8)] * 6, "a replaced block is named nowhere any more"
    table[5] = given[5]
    table.append(BlockRef(7, 7))
    assert table.live == [given[5], BlockRef(7, 7)] and table.copy().live == table.live
    assert other.live == given, "a copy is another table"
    assert BlockTable(given[4:], 4).live == given[4:] and len(BlockTable(given[4:], 4)) == 6


def test_a_sequence_drops_what_no_later_position_reads() -> None:
    rng, size = random.Random(1), 4
    layout = KvLayout(size, (FULL, windowed(6), windowed(9)))
    sequence = Sequence([1], [], SamplingParams(), StoppingParams(max_tokens=9))
    sequence.set_tables(BlockTable() for _ in layout.groups)
    held: set[BlockRef] = set()
    for position in range(200):
        if position % size == 0:
            for group, table in enumerate(sequence.tables):
                table.append(BlockRef(1000 * group + position, rng.randrange(99)))
                held.add(table[-1])
        sequence.num_computed = position + 1
        dropped = sequence.drop_unneeded(layout)
        assert held >= set(dropped) and len(dropped) == len(set(dropped))
        held -= set(dropped)
        assert held == set(sequence.live_refs()) and len(held) == len(sequence.live_refs())
        for spec, table in zip(layout.groups, sequence.tables, strict=True):
            assert len(table.live) == spec.retention.num_needed(position + 1, size)
            oldest = 0 if spec.window is None else max(0, position + 2 - spec.window)
            assert table.first <= oldest // size, "the next position reads it"
    fork = sequence.fork(1)
    fork.tables[1].drop(len(fork.tables[1]) - 1)
    assert sequence.live_refs() != fork.live_refs() and held == set(sequence.live_refs())
    sequence.forget_blocks()
    assert sequence.live_refs() == [] and len(sequence.tables) == 3
