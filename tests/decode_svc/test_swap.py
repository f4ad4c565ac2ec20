"""The host tier: swapped blocks come back with the same bytes and sharing, and no memory stays in use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from block_store.arena.arena import Arena
from block_store.holder.held_blocks import HeldBlocks
from block_store.ledger.client import LedgerClient
from block_store.ledger.codec import SealItem
from block_store.ledger.prefix_hash import chain_start, next_hash
from block_store.ledger.rebuild import open_ledger
from common.group_need import blocks_of
from common.types import BlockRef, SamplingParams, StoppingParams
from decode_svc.scheduler import Group
from decode_svc.swap import SwapSpace
from engine.block_table import BlockTable
from engine.model_runner import ModelRunner, RunnerSettings
from engine.sequence import Sequence
from engine.tiny import make_checkpoint

BLOCK = 4
NUM_BLOCKS = 24


class Place:
    """An arena with its ledger, one holder, and a host tier."""

    def __init__(self, runner: ModelRunner, directory: Path, redis_client: Any) -> None:
        self.runner = runner
        self.arena = Arena.create(directory, runner.layout, NUM_BLOCKS)
        ledger, slot = open_ledger(redis_client, self.arena), self.arena.acquire_writer_slot()
        holder = LedgerClient.register(ledger, "decode", writer_slot=slot.number)
        self.held = HeldBlocks(holder, self.arena, slot, 0)
        runner.bind(self.arena.data)
        self.attached: Any = SimpleNamespace(arena=self.arena, held=self.held)
        self.random = np.random.default_rng(0)

    def space(self, num_blocks: int = NUM_BLOCKS) -> SwapSpace:
        return SwapSpace(self.runner, self.attached, num_blocks * self.arena.block_bytes)

    def sequence(self, num_computed: int, tail_sealed: bool = False) -> Sequence:
        """Returns a sequence with random KV and published full blocks."""
        tokens = self.random.integers(0, 500, num_computed).tolist()
        made = Sequence(tokens, [7], SamplingParams(), StoppingParams())
        made.num_computed, made.num_sealed = num_computed, num_computed // BLOCK
        made.hashes = [chain_start(b"domain", b"")]
        refs = self.held.alloc(blocks_of(num_computed, BLOCK))
        self.write(refs)
        made.extend_hashes(made.num_sealed, BLOCK, next_hash)
        items = [SealItem(ref, made.block_hash(i)) for i, ref in enumerate(refs[: made.num_sealed])]
        if tail_sealed:
            items.append(SealItem(refs[-1], None))
        if items:
            self.held.seal(items)
        made.tail_sealed = tail_sealed
        made.table = BlockTable(refs)
        return made

    def fork(self, sequence: Sequence, sample_index: int) -> Sequence:
        self.held.share(sequence.table)
        return sequence.fork(sample_index)

    def write(self, refs: list[BlockRef]) -> None:
        for ref in refs:
            self.arena.data[ref.block] = self.random.integers(0, 256, self.arena.block_bytes, np.uint8)

    def content(self, sequence: Sequence) -> list[bytes]:
        return [self.arena.read(ref.block) for ref in sequence.table]

    def churn(self) -> None:
        """Allocates every block for another holder that writes to it, so that nothing stays cached."""
        refs = self.held.alloc(NUM_BLOCKS - self.held.num_held)
        self.write(refs)
        self.held.release(refs)

    def close(self) -> None:
        self.held.assert_idle()
        self.held.close()
        self.arena.remove()


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    directory = tmp_path_factory.mktemp("model")
    make_checkpoint(directory, "llama")
    return ModelRunner(RunnerSettings(directory, num_threads=1, max_model_len=64, device="cpu", block_size=BLOCK))


@pytest.fixture
def place(runner: ModelRunner, redis_client: Any, tmp_path: Path) -> Iterator[Place]:
    made = Place(runner, tmp_path, redis_client)
    yield made
    made.close()


def group_of(*sequences: Sequence) -> Group:
    return Group(1, 0, list(sequences), live=list(sequences))


def test_a_group_comes_back_byte_for_byte(place: Place) -> None:
    space, sequence = place.space(), place.sequence(10)
    before, group = place.content(sequence), group_of(sequence)
    assert space.need(group) == 3 and space.swap_out(group)
    assert not len(sequence.table) and place.held.num_held == 0 and space.num_free == NUM_BLOCKS - 3
    place.churn()
    assert space.swap_in(group, 0) == 3
    assert place.content(sequence) == before
    assert place.held.num_held == 3 and space.num_free == NUM_BLOCKS
    place.held.release(list(sequence.table))


def test_blocks_that_come_back_are_published_again(place: Place) -> None:
    space, sequence = place.space(), place.sequence(8)
    group, hashes = group_of(sequence), sequence.hashes[1:]
    space.swap_out(group)
    place.churn()
    assert place.held.acquire([hashes]) == [[]]
    space.swap_in(group, 0)
    assert place.held.acquire([hashes]) == [list(sequence.table)]
    place.held.release_many([sequence.table, sequence.table])


def test_what_is_still_cached_is_not_copied(place: Place) -> None:
    space, sequence = place.space(), place.sequence(10)
    before, refs, group = place.content(sequence), list(sequence.table), group_of(sequence)
    space.swap_out(group)
    assert space.swap_in(group, 0) == 1  # only the partial block
    assert sequence.table[:2] == refs[:2] and place.content(sequence) == before
    place.held.release(list(sequence.table))


def test_blocks_published_by_others_meanwhile_take_the_place_of_ours(place: Place) -> None:
    """The head is evicted, and the tail is cached. The tail is copied back, and then found in the index."""
    space, sequence = place.space(), place.sequence(12)
    group, hashes = group_of(sequence), sequence.hashes[1:]
    space.swap_out(group)
    place.churn()
    [tail] = place.held.alloc(1)
    place.held.seal([SealItem(tail, hashes[2])])
    assert space.swap_in(group, 0) == 3
    assert sequence.table[2] == tail and place.held.count(tail) == 2 and place.held.num_held == 3
    place.held.release_many([sequence.table, [tail]])


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("num_prompt", [8, 10])
def test_what_was_shared_is_shared_again(place: Place, num_prompt: int, cached: bool) -> None:
    space, first = place.space(), place.sequence(num_prompt, tail_sealed=num_prompt % BLOCK != 0)
    live = [first, *(place.fork(first, i) for i in range(1, 4))]
    for sequence in live[2:]:  # two sequences write private blocks
        if sequence.tail_sealed:
            place.held.release([sequence.table[-1]])
            sequence.table[-1], sequence.tail_sealed = place.held.alloc(1)[0], False
        else:
            sequence.table.append(place.held.alloc(1)[0])
            sequence.num_computed += 1
        place.write([sequence.table[-1]])
    before, group = [place.content(s) for s in live], group_of(*live)
    shared, held = [place.held.count(ref) for ref in first.table], place.held.num_held
    assert space.need(group) == held
    space.swap_out(group)
    assert place.held.num_held == 0
    if not cached:
        place.churn()
    copied = space.swap_in(group, 0)
    assert copied == (held - 2 if cached else held)
    assert [place.content(s) for s in live] == before
    assert [place.held.count(ref) for ref in first.table] == shared and place.held.num_held == held
    assert not any(s.tail_sealed for s in live)
    place.held.release_many([s.table for s in live])


def test_branches_with_sealed_blocks_of_their_own(place: Place) -> None:
    space, first = place.space(), place.sequence(8)
    second = place.fork(first, 1)
    for sequence in (first, second):
        sequence.output_ids = place.random.integers(0, 500, 5).tolist()
        [fresh] = place.held.alloc(1)
        place.write([fresh])
        sequence.num_computed, sequence.num_sealed = 12, 3
        sequence.extend_hashes(3, BLOCK, next_hash)
        place.held.seal([SealItem(fresh, sequence.block_hash(2))])
        sequence.table.append(fresh)
    before, group = [place.content(s) for s in (first, second)], group_of(first, second)
    for expected in (0, 4):  # in the first pass, all of them are cached
        space.swap_out(group)
        if expected:
            place.churn()
        assert space.swap_in(group, 0) == expected
        assert [place.content(s) for s in (first, second)] == before
    place.held.release_many([first.table, second.table])


def test_a_copy_that_was_only_planned_is_undone(place: Place) -> None:
    space, first = place.space(), place.sequence(10, tail_sealed=True)
    second = place.fork(first, 1)
    before = place.content(first)
    second.copy_from, second.tail_sealed = (second.table[-1],), False
    second.table[-1] = place.held.alloc(1)[0]
    group = group_of(first, second)
    assert space.need(group) == 3
    space.swap_out(group)
    assert place.held.num_held == 0
    place.churn()
    assert space.swap_in(group, 0) == 3
    assert place.content(first) == place.content(second) == before and not second.copy_from
    assert place.held.count(first.table[-1]) == 2
    place.held.release_many([first.table, second.table])


def test_samples_that_ended_meanwhile_do_not_come_back(place: Place) -> None:
    space, first, second = place.space(), place.sequence(10), place.sequence(6)
    group = group_of(first, second)
    space.swap_out(group)
    group.live.remove(first)
    space.swap_in(group, 0)
    assert place.held.num_held == 2 and space.num_free == NUM_BLOCKS
    place.held.release(list(second.table))


def test_all_blocks_come_back_or_none(place: Place) -> None:
    space, sequence = place.space(), place.sequence(10)
    before, group = place.content(sequence), group_of(sequence)
    space.swap_out(group)
    place.churn()
    others = place.held.alloc(NUM_BLOCKS - 4)
    assert space.swap_in(group, spare=2) is None
    assert place.held.num_held == NUM_BLOCKS - 4 and group in space
    assert space.swap_in(group, spare=1) == 3
    assert place.content(sequence) == before
    place.held.release_many([others, sequence.table])


def test_cached_blocks_are_let_go_where_the_rest_cannot_be_had(place: Place) -> None:
    space, sequence = place.space(), place.sequence(10)
    group = group_of(sequence)
    space.swap_out(group)
    others = place.held.alloc(NUM_BLOCKS - 2)  # only the two cached blocks remain
    assert space.swap_in(group, 0) is None and place.held.num_held == NUM_BLOCKS - 2
    place.held.release(others)
    assert space.swap_in(group, 0) is not None
    place.held.release(list(sequence.table))


def test_room(place: Place) -> None:
    space = place.space(3)
    assert space.num_blocks == 3 and space.has_room(3) and not space.has_room(4)
    assert place.space(10 * NUM_BLOCKS).num_blocks == NUM_BLOCKS  # never more than the arena
    assert not place.space(0).has_room(1)
    group, other = group_of(place.sequence(6)), group_of(place.sequence(3))
    assert space.swap_out(group) and space.has_room(1) and not space.has_room(2)
    assert space.swap_out(other) and not space.has_room(1)
    space.drop(group)
    assert space.has_room(2)
    space.drop(other)
    space.drop(other)
    assert space.num_free == 3


def test_blocks_that_live_another_life_are_not_swapped(place: Place) -> None:
    space, sequence = place.space(), place.sequence(6)
    kept = list(sequence.table)
    sequence.table[0] = BlockRef(kept[0].block, kept[0].generation - 1)
    group = group_of(sequence)
    assert not space.swap_out(group)
    assert space.num_free == NUM_BLOCKS and group not in space and len(sequence.table) == 2
    place.held.release(kept)


def test_the_reader_rule_holds_after_the_copy_too(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    space, sequence = place.space(), place.sequence(6)
    copy, block = space._copy, sequence.table[0].block

    def overtaken(*args: Any) -> None:
        copy(*args)
        place.arena.generations[block] += 1

    monkeypatch.setattr(space, "_copy", overtaken)
    assert not space.swap_out(group_of(sequence)) and space.num_free == NUM_BLOCKS
    place.arena.generations[block] -= 1
    place.held.release(list(sequence.table))
