"""A breadth-first search of the states that two holders, two blocks and two hashes can reach, with the real scripts in
a real Redis. States that differ only in generations, epochs, clocks or call numbers count as one state. The moves
include calls of alloc, acquire, claim, release, seal and hand_over, each made twice, and the ends of holders and
tickets. The invariants are checked after each move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from block_store import errors
from block_store.ledger import invariants
from block_store.ledger.codec import SealItem
from block_store.ledger.inspection import BlockState, Inspection, inspect
from block_store.ledger.scripts import CallId
from common.types import BlockRef, Epoch
from testing.ledger.store import LONG_S, TestStore, chain

HASHES = (chain("a", 1)[0], chain("b", 1)[0])
NUM_BLOCKS = 2
_SAVE = """
local found = {}
for i, key in ipairs(redis.call('KEYS', KEYS[1] .. '*')) do
  found[2 * i - 1], found[2 * i] = key, redis.call('DUMP', key)
end
return found
"""
_LOAD = """
for _, key in ipairs(redis.call('KEYS', KEYS[1] .. '*')) do redis.call('DEL', key) end
for i = 1, #ARGV, 2 do redis.call('RESTORE', ARGV[i], 0, ARGV[i + 1]) end
"""


@dataclass(frozen=True, slots=True)
class Role:
    """A record of a holder's incarnation and of whether the incarnation has been reaped."""

    slot: int
    epoch: Epoch
    number: int = 0
    is_dead: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """A saved state of the search, with its distance from the start in moves."""

    saved: tuple[bytes, ...]
    roles: tuple[Role, ...]
    depth: int


Move = tuple[str, Callable[[], object], tuple[Role, ...]]
"""The name of a move, the function that makes it, and the roles after it."""
RoleMove = tuple[str, Callable[[], object], Role]


class SmallWorld:
    """A search over the states. `explore` returns the number of states; `moves` counts the moves by name."""

    def __init__(self, store: TestStore) -> None:
        self.store = store
        self.moves: dict[str, int] = {}
        self._save = store.client.register_script(_SAVE)
        self._load = store.client.register_script(_LOAD)

    def explore(self, max_depth: int) -> int:
        """Returns the number of states within `max_depth` moves. Raises AssertionError if an invariant is broken."""
        start = self._keep(tuple(Role(slot, self._register(slot)) for slot in (1, 2)), 0)
        seen, frontier = {self._shape(start.roles)}, [start]
        while frontier:
            following: list[Node] = []
            for node in frontier:
                self._go(node)
                for name, run, roles in list(self._possible(node)):
                    self._go(node)
                    before = inspect(self.store.ledger, with_blocks=True)
                    run()
                    assert not (found := invariants.check(self.store.ledger, before)), (name, found)
                    self.moves[name] = self.moves.get(name, 0) + 1
                    if (shape := self._shape(roles)) not in seen:
                        seen.add(shape)
                        if node.depth + 1 < max_depth:
                            following.append(self._keep(roles, node.depth + 1))
            frontier = following
        return len(seen)

    def _possible(self, node: Node) -> Iterator[Move]:
        now = inspect(self.store.ledger, with_blocks=True)
        tickets = [holder.epoch for holder in now.holders if holder.kind == "ticket"]
        for index, role in enumerate(node.roles):
            moves = self._of_dead(role) if role.is_dead else self._of(role, now, tickets)
            for name, run, after in moves:
                yield name, run, tuple(after if i == index else other for i, other in enumerate(node.roles))
        for ticket in tickets:
            yield "a ticket ends", partial(self._end, ticket), node.roles

    def _of(self, role: Role, now: Inspection, tickets: list[Epoch]) -> Iterator[RoleMove]:
        ledger, lane = self.store.ledger, CallId(role.epoch, role.number + 1)
        calls: list[tuple[str, Callable[[], object]]] = [
            ("alloc 1", partial(ledger.alloc, lane, 1)),
            ("alloc 2", partial(ledger.alloc, lane, 2)),
            ("acquire a", partial(ledger.acquire, lane, [HASHES[:1]])),
            ("acquire ab", partial(ledger.acquire, lane, [HASHES])),
            *(("claim", partial(ledger.claim, lane, self.store.ticket_id(ticket))) for ticket in tickets),
        ]
        for block, view in enumerate(now.blocks):
            ref = BlockRef(block, view.generation)
            if role.epoch not in view.holders:
                continue
            calls.append(("release", partial(ledger.release, lane, [ref])))
            if view.state is BlockState.RESERVED:
                items = [SealItem(ref, prefix_hash) for prefix_hash in (*HASHES, None)]
                calls += [("seal", partial(ledger.seal, lane, [item])) for item in items]
            elif not tickets:
                calls.append(("hand over", partial(ledger.hand_over, lane, [ref], LONG_S)))
        for name, call in calls:
            yield name, partial(self._twice, call), Role(role.slot, role.epoch, role.number + 1)
        yield "die", partial(self._die, role), Role(role.slot, role.epoch, role.number, is_dead=True)

    def _of_dead(self, role: Role) -> Iterator[RoleMove]:
        """Yields the moves of a dead holder: a late call, which has no effect, and the end of the holder's process,
        after which its unsealed blocks are free and a successor registers.
        """
        lane = CallId(role.epoch, role.number + 1)
        yield "late call", partial(self._refused, partial(self.store.ledger.alloc, lane, 1)), role
        last = self.store.client.hget(self.store.ledger.tag + "meta", "epoch")
        successor = Role(role.slot + 2, Epoch(int(last or 0) + 1))  # type: ignore[arg-type]
        yield "come back", partial(self._come_back, role, successor), successor

    def _come_back(self, role: Role, successor: Role) -> None:
        self.store.ledger.reap([role.slot], gap_s=LONG_S)
        assert self._register(successor.slot) == successor.epoch

    def _twice(self, call: Callable[[], object]) -> None:
        """Makes a call twice. Checks I8, and that a refusal changes nothing."""
        before = self.store.moment()
        answer = _answer(call)
        after = self.store.moment()
        assert repr(_answer(call)) == repr(answer) and self.store.moment() == after, f"I8: {answer}"
        assert after == before or not isinstance(answer, errors.LedgerError), f"refused with an effect: {answer}"

    def _refused(self, call: Callable[[], object]) -> None:
        before = self.store.moment()
        assert isinstance(_answer(call), errors.Fenced) and self.store.moment() == before, "I5"

    def _register(self, slot: int) -> Epoch:
        return self.store.ledger.register("role", writer_slot=slot, lease_s=LONG_S)

    def _die(self, role: Role) -> None:
        """Reaps a holder, and checks that the blocks that it was writing are in quarantine."""
        before = self.store.moment().blocks
        self._end(role.epoch)
        for old, new in zip(before, self.store.moment().blocks, strict=True):
            was_writing = old.state is BlockState.RESERVED and role.epoch in old.holders
            assert not was_writing or new.state is BlockState.QUARANTINE, "a torn write is not quarantined"

    def _end(self, epoch: Epoch) -> None:
        self.store.expire(epoch)
        assert epoch in self.store.ledger.reap(gap_s=LONG_S).reaped

    def _shape(self, roles: tuple[Role, ...]) -> tuple[Any, ...]:
        """Returns the parts of the current state by which the search compares states."""
        now = inspect(self.store.ledger, with_blocks=True)
        names: dict[Epoch, int | str] = {role.epoch: index for index, role in enumerate(roles)}
        waits = {block: index for block, slot in now.quarantine for index, r in enumerate(roles) if r.slot == slot}
        blocks = tuple(
            (
                view.state,
                view.prefix_hash,
                frozenset(names.get(e, "ticket") for e in view.holders),
                waits.get(i),
            )
            for i, view in enumerate(now.blocks)
        )
        num_tickets = sum(holder.kind == "ticket" for holder in now.holders)
        return (blocks, now.free, now.cached, num_tickets, tuple(role.is_dead for role in roles))

    def _keep(self, roles: tuple[Role, ...], depth: int) -> Node:
        return Node(tuple(self._save(keys=[self.store.ledger.tag])), roles, depth)

    def _go(self, node: Node) -> None:
        self._load(keys=[self.store.ledger.tag], args=node.saved)


def _answer(call: Callable[[], object]) -> object:
    try:
        return call()
    except errors.LedgerError as refusal:
        return refusal
