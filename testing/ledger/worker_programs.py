"""Workers as programs that run one step at a time over a real arena and ledger, for tests. A search can stop a program
between two steps, let other programs continue, and wake the stopped one again. `Rules` switches the writer and reader
rules on and off (docs/design.md, Ledger). If a rule is off, the search should find an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from block_store import errors
from block_store.ledger.codec import SealItem
from block_store.ledger.rebuild import rebuild
from common.types import BlockRef
from testing.ledger.store import LONG_S, Caller, TestStore, chain, content

Program = Generator[str]
_GARBAGE = 0xEE


@dataclass(frozen=True, slots=True)
class Rules:
    """The switches of the writer and reader rules. A rule whose field is False is broken."""

    enter_before_store: bool = True
    compare_with_table: bool = True
    """If False, two readings of the header are compared with each other instead."""
    quarantine_by_lock: bool = True
    """If False, blocks that a dead worker was writing are free at the next sweep."""
    compare_before_seal: bool = True


@dataclass(slots=True)
class Actor:
    """A worker process, with its current position in its program."""

    caller: Caller
    rebuild_count: int
    program: Program | None = None
    at: str = "idle"
    held: list[BlockRef] = field(default_factory=list)


class World:
    """A small arena with actors. Methods take a function `choose`, whose numbers determine the events: `choose(n)`
    returns a number from 0 to n - 1.
    """

    def __init__(self, store: TestStore, rules: Rules, successes: Counter[str], num_actors: int = 3) -> None:
        self.store = store
        self.rules = rules
        self.successes = successes
        self.waiting: tuple[int, ...] = ()
        self.actors = [self._spawn() for _ in range(num_actors)]

    def act(self, choose: Callable[[int], int]) -> None:
        """Lets an actor run a step, freezes or kills an actor, sweeps, rebuilds the ledger, or does nothing. Then
        checks the indexed blocks (I7).
        """
        index, what = choose(len(self.actors)), choose(20)
        if what < 16:
            self._step(index, choose)
        elif what == 16:
            self._freeze(index, choose)
        elif what == 17:
            self._kill(index)
        elif what == 18:
            self.sweep()
        elif choose(4) == 0:
            self._flush()
        self.check()

    def check(self) -> None:
        """Checks I7: every indexed block has the content of its hash. Skips blocks whose generation in the header
        differs from that in the ledger.
        """
        for block, view in enumerate(self.store.moment().blocks):
            if view.prefix_hash is not None and int(self.store.arena.generations[block]) == view.generation:
                as_sealed = (self.store.arena.data[block] == content(view.prefix_hash)).all()
                assert as_sealed, f"I7: block {block} is not as sealed"

    def sweep(self) -> None:
        arena, locked = self.store.arena, self.rules.quarantine_by_lock
        free = [slot for slot in self.waiting if not (locked and arena.is_writer_alive(slot))]
        self.waiting = self.store.ledger.reap(free, gap_s=LONG_S).waiting_slots

    def _spawn(self) -> Actor:
        return Actor(self.store.caller(), self.store.arena.rebuild_count)

    def _freeze(self, index: int, choose: Callable[[int], int]) -> None:
        """Stops and fences one actor while other actors work in the arena. The actor may then wake and run some or all
        of its remaining steps.
        """
        actor = self.actors[index]
        self.store.expire(actor.caller.epoch)
        self.sweep()
        self.successes["fenced at " + actor.at] += 1
        others = [other for other in range(len(self.actors)) if other != index]
        for _ in range(choose(40)):
            self._step(others[choose(len(others))], choose)
            self.check()
        while choose(4) and actor.program is not None and self.actors[index] is actor:
            self._step(index, choose)
            self.check()
        if choose(3) == 0:
            self._flush()

    def _kill(self, index: int) -> None:
        actor = self.actors[index]
        actor.caller.slot.close()
        self.store.expire(actor.caller.epoch)
        self.sweep()
        self.successes["killed at " + actor.at] += 1
        self.actors[index] = self._spawn()

    def _flush(self) -> None:
        self.store.ledger.forget()
        self.store.ledger = self.store.ledger.under(rebuild(self.store.client, self.store.arena, grace_s=0))
        self.waiting = ()
        self.successes["rebuild"] += 1

    def _step(self, index: int, choose: Callable[[int], int]) -> None:
        actor = self.actors[index]
        if actor.program is None:
            actor.program = self._request(actor, chain("ab"[choose(2)] + "xy"[choose(2)], 3))
        try:
            actor.at = next(actor.program)
            self.successes[actor.at] += 1
        except StopIteration:
            actor.program, actor.at = None, "idle"
        except (errors.Fenced, errors.StaleDataset, errors.HeaderAheadError, errors.HeaderMismatch, errors.Stale):
            self.successes["starts over"] += 1
            actor.caller.slot.close()
            self.actors[index] = self._spawn()

    def _request(self, actor: Actor, hashes: Sequence[bytes]) -> Program:
        """Reads the cached part of a chain, computes the next block from it, and seals that block. Each `yield` ends a
        step.
        """
        ledger, arena, caller = actor.caller.ledger, self.store.arena, actor.caller
        [cached] = ledger.acquire(caller.lane(), [hashes[:-1]])
        yield "acquired"
        try:
            [own] = ledger.alloc(caller.lane(), 1)
        except errors.Exhausted:
            ledger.release(caller.lane(), cached)
            return
        yield "allocated"
        if self.rules.enter_before_store:
            self._enter(actor, own)
            yield "entered"
        before = self._readings(cached)
        if self.rules.compare_with_table and before != [ref.generation for ref in cached]:
            raise errors.Stale("the first comparison")
        yield "compared"
        parents = zip(cached, hashes, strict=False)
        is_good = all((arena.data[ref.block] == content(prefix_hash)).all() for ref, prefix_hash in parents)
        yield "read"
        arena.data[own.block] = content(hashes[len(cached)]) if is_good else _GARBAGE
        yield "stored"
        if not self.rules.enter_before_store:
            self._enter(actor, own)
            yield "entered"
        if self.rules.compare_before_seal:
            self._compare(cached, before, is_good)
            yield "compared again"
        items = [SealItem(own, hashes[len(cached)])]
        arena.mark_sealed([own], [hashes[len(cached)]], [arena.digest(own.block)])
        yield "marked"
        final = ledger.seal(caller.lane(), items)
        yield "sealed"
        if not self.rules.compare_before_seal:
            self._compare(cached, before, is_good)
        ledger.release(caller.lane(), [*cached, *dict.fromkeys([own, *final])])

    def _enter(self, actor: Actor, own: BlockRef) -> None:
        """Applies the writer rule. Raises StaleDataset if a rebuild has begun since the actor was started."""
        arena = self.store.arena
        if arena.rebuild_count != actor.rebuild_count:
            raise errors.StaleDataset("before entering")
        arena.raise_generations([own], actor.caller.slot.number)
        if arena.rebuild_count != actor.rebuild_count:
            raise errors.StaleDataset("after entering")

    def _compare(self, cached: Sequence[BlockRef], before: Sequence[int], is_good: bool) -> None:
        """Makes the second comparison. Raises Stale if it fails. Otherwise, checks that the blocks were read as they
        were sealed (I7).
        """
        expected = [ref.generation for ref in cached] if self.rules.compare_with_table else list(before)
        if self._readings(cached) != expected:
            self.successes["stale read found"] += 1
            raise errors.Stale("the second comparison")
        assert is_good, "I7: read what was not sealed, and no comparison found it"

    def _readings(self, refs: Sequence[BlockRef]) -> list[int]:
        return [int(self.store.arena.generations[ref.block]) for ref in refs]
