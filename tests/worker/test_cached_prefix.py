"""The longest prefix that every KV group can continue from, on a real ledger."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from block_store.holder.held_blocks import HeldBlocks
from block_store.ledger.codec import SealItem
from block_store.ledger.prefix_hash import group_hash
from block_store.ledger.prefix_lengths import PrefixLengths
from block_store.ledger.scripts import CHUNK, LedgerScripts
from block_store.redis import redis_server
from common.types import BlockRef, KvKind, KvLayout, KvSpec
from gateway.fleet.discovery import cached_blocks
from testing.ledger.store import TestStore, chain, content
from worker.cached_prefix import CachedPrefix, find_prefix

SIZE = 16


def spec(window: int | None) -> KvSpec:
    return KvSpec(1, 1, 8, "bfloat16", KvKind.FULL if window is None else KvKind.SLIDING, window)


def layout_of(*windows: int | None) -> KvLayout:
    return KvLayout(SIZE, tuple(map(spec, windows)))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TestStore]:
    redis = redis_server.connect(None, str(tmp_path))
    made = TestStore(redis.client, tmp_path, num_blocks=CHUNK * 4)
    yield made
    made.close()
    redis.close()


def fill(held: HeldBlocks, name: str, group: int, blocks: range, length: int) -> dict[int, BlockRef]:
    """Publishes these blocks of a chain in a KV group, one by one."""
    hashes = [group_hash(one, group) for one in chain(name, length)]
    refs = held.alloc(len(blocks))
    for ref, block in zip(refs, blocks, strict=True):
        held.arena.data[ref.block] = content(hashes[block])
    sealed = held.seal([SealItem(ref, hashes[block]) for ref, block in zip(refs, blocks, strict=True)])
    return dict(zip(blocks, sealed, strict=True))


@pytest.mark.parametrize("seed", range(40))
def test_usable_is_what_the_next_position_can_read(seed: int) -> None:
    """Compares with the definition, position by position."""
    rng = random.Random(seed)
    windows = rng.choices([None, 1, 2, 16, 17, 18, 40, 100], k=rng.randint(1, 3))
    layout, num_blocks = layout_of(*windows), rng.randint(1, 12)
    present = {g: [rng.random() < 0.8 for _ in range(num_blocks)] for g in range(len(windows))}

    def is_usable(length: int) -> bool:
        for group, window in enumerate(windows):
            first = 0 if window is None else max(0, length * SIZE - window + 1)
            read = {p // SIZE for p in range(first, length * SIZE)} | {length - 1}
            if not all(present[group][block] for block in read):
                return False
        return True

    assert layout.rules().usable_length(present) == max(
        (n for n in range(1, num_blocks + 1) if is_usable(n)), default=0
    )


@pytest.mark.parametrize("windows", [(None,), (None, 2 * SIZE), (SIZE, 3 * SIZE), (None, 1, 1), (None, None, 40)])
def test_the_gateway_guesses_what_prefill_finds(store: TestStore, windows: tuple[int | None, ...]) -> None:
    held, layout, rng = store.held(), layout_of(*windows), random.Random(len(windows))
    lengths, seen = PrefixLengths(store.client), set[int]()
    for number in range(30):
        name, length = f"{number}", rng.randint(1, 9)
        for group, window in enumerate(windows):
            kept = range(rng.randint(0, length)) if window is None else range(rng.randint(0, length), length)
            held.release(list(fill(held, name, group, kept, length).values()))
        found = find_prefix(held, chain(name, length), layout)
        assert cached_blocks(lengths, [store.ledger], chain(name, length), layout.rules()) == [found.num_blocks]
        held.release_many(found.tables)
        seen.add(found.num_blocks)
    assert len(seen) > 2
    held.assert_idle()


@pytest.mark.parametrize("windows", [(None,), (None, 2 * SIZE), (2 * SIZE,)])
def test_a_rebuilt_ledger_does_not_hide_what_others_have(store: TestStore, windows: tuple[int | None, ...]) -> None:
    held, layout = store.held(), layout_of(*windows)
    for group in range(len(windows)):
        fill(held, "a", group, range(5), 5)
    old = store.ledger.under("a generation before")
    ledgers = [old, store.ledger]
    assert cached_blocks(PrefixLengths(store.client), ledgers, chain("a", 5), layout.rules()) == [0, 5]


def test_the_gateway_checks_windows_at_the_end_of_what_full_attention_finds(
    store: TestStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, layout, length = store.held(), layout_of(None, 2 * SIZE), CHUNK + 40
    fill(held, "a", 0, range(length), length)
    fill(held, "a", 1, range(length - 3, length - 1), length)
    asked: list[int] = []
    lengths = PrefixLengths(store.client)
    present = LedgerScripts.present
    monkeypatch.setattr(LedgerScripts, "present", lambda *args: asked.append(len(args[1])) or present(*args))
    assert cached_blocks(lengths, [store.ledger], chain("a", length), layout.rules()) == [length - 1]
    assert asked == [CHUNK], "one call"


def test_the_picture_in_the_docstring(store: TestStore) -> None:
    held, layout = store.held(), layout_of(None, 2 * SIZE)
    full = fill(held, "a", 0, range(7), 8)
    window = fill(held, "a", 1, range(2, 4), 8) | fill(held, "a", 1, range(5, 7), 8)
    found = find_prefix(held, chain("a", 8), layout)
    assert found == CachedPrefix(7, [[full[i] for i in range(7)], [window[5], window[6]]])
    assert held.count(full[0]) == 2 and held.count(window[6]) == 2 and held.count(window[2]) == 1
    held.release_many(found.tables)

    shorter = find_prefix(held, chain("a", 6), layout)  # no longer includes block 6
    assert shorter == CachedPrefix(4, [[full[i] for i in range(4)], [window[2], window[3]]])
    assert held.count(full[4]) == 1, "what the window does not allow is not kept"
    held.release_many(shorter.tables)
    held.release_many([full.values(), window.values()])
    held.assert_idle()


def test_nothing_is_found_where_a_window_is_missing(store: TestStore) -> None:
    held, layout = store.held(), layout_of(None, 3 * SIZE)
    refs = fill(held, "a", 0, range(6), 6)
    assert find_prefix(held, chain("a", 6), layout) == CachedPrefix.nothing(layout)
    assert held.count(refs[0]) == 1 and held.num_held == 6


def test_a_window_alone_needs_no_head(store: TestStore) -> None:
    """If all layers have a window, a prefix can be continued even if its head has been evicted."""
    held, layout, length = store.held(), layout_of(2 * SIZE), CHUNK * 2 + 9  # takes several lookup calls
    refs = fill(held, "a", 0, range(length - 5, length), length)
    found = find_prefix(held, chain("a", length), layout)
    assert found == CachedPrefix(length, [[refs[length - 2], refs[length - 1]]])
    held.release_many([*found.tables, refs.values()])
    held.assert_idle()


def test_groups_do_not_find_each_others_blocks() -> None:
    hashes = chain("a", 3)
    every = {group_hash(one, group) for one, group in itertools.product(hashes, range(5))}
    assert len(every) == 15 and group_hash(hashes[0], 0) == hashes[0]


def test_a_window_that_is_wider_than_a_call(store: TestStore) -> None:
    held, length = store.held(), CHUNK + 20
    layout = layout_of(None, (CHUNK + 3) * SIZE, (CHUNK + 3) * SIZE)
    every = [fill(held, "a", group, range(length), length) for group in range(3)]
    found = find_prefix(held, chain("a", length), layout)
    assert found.num_blocks == length and [len(table) for table in found.tables] == [length, CHUNK + 3, CHUNK + 3]
    assert found.tables[2] == [every[2][block] for block in range(length - CHUNK - 3, length)]


def test_a_block_that_is_evicted_meanwhile_costs_the_prefix_and_nothing_else(
    store: TestStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, layout = store.held(), layout_of(None, SIZE + 1)
    full, window = fill(held, "a", 0, range(4), 4), fill(held, "a", 1, range(4), 4)
    held.release_many([window.values()])
    present = held.present

    def evict_then(hashes: list[bytes]) -> list[bool]:
        marks = present(hashes)
        taken = held.alloc(held.num_free_hint)  # all free and cached blocks
        held.release(taken)
        return marks

    monkeypatch.setattr(held, "present", evict_then)
    held.holder.lease.beat()
    assert find_prefix(held, chain("a", 4), layout) == CachedPrefix.nothing(layout)
    held.release(list(full.values()))
    held.assert_idle()


def test_without_the_ledger_no_window_is_found(store: TestStore) -> None:
    held, layout = store.held(), layout_of(SIZE)
    fill(held, "a", 0, range(2), 2)
    held.holder.breaker.open("for this test")
    assert find_prefix(held, chain("a", 2), layout) == CachedPrefix.nothing(layout)
    assert held.fallbacks.counts["no prefix looked up"] >= 1
