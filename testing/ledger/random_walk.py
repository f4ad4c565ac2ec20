"""A walk of random operations on a ledger, for tests. The walk keeps models of the holders and tickets. It checks that
the invariants hold, and that a repeated, stale or fenced call does not change the ledger. I5 to I11 are invariants of
docs/design.md.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from block_store import errors
from block_store.ledger.codec import SealItem
from block_store.ledger.inspection import BlockState, Inspection
from block_store.ledger.rebuild import rebuild
from block_store.ledger.replies import ReapReport, Standing
from block_store.ledger.scripts import TICKET_SECRET_BYTES, CallId, LedgerScripts
from common.ticket import TicketId
from common.types import BlockRef, CacheQuota
from testing.ledger.store import LONG_S, Caller, TestStore, chain, content, indexed

QUOTAS = {"ax": CacheQuota(b"a" * 32, 34), "bx": CacheQuota(b"b" * 32, 9)}
"""The quotas of the tenants, by the names of their chains."""


@dataclass(slots=True)
class Mine:
    """A model of one holder."""

    caller: Caller
    held: dict[BlockRef, bytes | None] = field(default_factory=dict)
    """The sealed references and their hashes. The hash is None for a block that is not in the index, because it was
    sealed without a hash or another block already had its hash.
    """
    unsealed: list[BlockRef] = field(default_factory=list)


@dataclass(slots=True)
class Paper:
    """A model of one ticket."""

    id: TicketId
    held: dict[BlockRef, bytes | None]


class LedgerWalk:
    """A walk on one ledger, with a method for each kind of operation. The methods take arbitrary integers, which select
    among the existing objects and vary the operation.
    """

    def __init__(self, store: TestStore, successes: Counter[str], num_holders: int = 3) -> None:
        self.store = store
        self.successes = successes
        self.holders = [Mine(store.caller(floor=floor)) for floor in (3, 0, 2)[:num_holders]]
        self.tickets: list[Paper] = []
        self.zombies: list[Mine] = []
        self.seen: dict[int, int] = {}
        self._known: Inspection | None = None
        """The state of the ledger after the last operation, or None if it is not known."""

    @property
    def ledger(self) -> LedgerScripts:
        return self.store.ledger

    def _now(self) -> Inspection:
        """Returns the state of the ledger. Reads it only if it is not known."""
        self._known = self._known or self.store.moment()
        return self._known

    def _reap(self, free_slots: Iterable[int] = ()) -> ReapReport:
        self._known = None
        return self.ledger.reap(free_slots, gap_s=LONG_S)

    def _mine(self, who: int) -> Mine:
        return self.holders[who % len(self.holders)]

    def _once(self, name: str, mine: Mine, operation: Callable[[CallId], object]) -> object:
        """Runs an operation, repeats it (I8), and checks the invariants. Returns the operation's answer or refusal."""
        before = self._now()
        answer = _attempt(lambda: operation(mine.caller.lane()))
        self._known = after = self.store.check(before)
        _check_quotas(after)
        again = _attempt(lambda: operation(mine.caller.last))
        assert repr(again) == repr(answer), f"I8: {name} answered {answer}, repeated {again}"
        assert again == answer or isinstance(answer, errors.LedgerError), f"I8: {name} gave another secret"
        assert self.store.moment() == after, f"I8: {name} happened twice"
        if isinstance(answer, errors.LedgerError):
            assert after == before, f"{name} was refused but changed something"
        else:
            self.successes[name] += 1
        return answer

    def alloc(self, who: int, n: int) -> None:
        mine, n = self._mine(who), n % 5 + 1
        moment = self._now()
        unused = sum(max(0, h.floor - h.num_references) for h in moment.holders if h.epoch != mine.caller.epoch)
        room = moment.counts.free + moment.counts.cached - unused
        answer = self._once("alloc", mine, lambda lane: self.ledger.alloc(lane, n))
        if isinstance(answer, errors.Exhausted):
            assert n > room, f"{n} refused with room for {room}"
            return
        assert isinstance(answer, list) and n <= room, f"floors: {n} given with room for {room}"
        for ref in answer:
            assert ref.generation > self.seen.get(ref.block, 0), f"I11: {ref} was given before"
            self.seen[ref.block] = ref.generation
        self.store.arena.raise_generations(answer, mine.caller.slot.number)
        mine.unsealed += answer

    def seal(self, who: int, which: int, n: int) -> None:
        mine = self._mine(who)
        items = self._written(mine, which, n)
        if not items:
            return
        answer = self._once("seal", mine, lambda lane: self.ledger.seal(lane, items))
        assert isinstance(answer, list), answer
        for item, used in zip(items, answer, strict=True):
            mine.held[used] = item.prefix_hash
            if item.ref != used:
                mine.held.setdefault(item.ref, None)
                self.successes["dedup"] += 1
            elif item.prefix_hash is not None:
                owner = self._now().blocks[used.block].owner
                assert (owner > 0) == (item.quota is not None), f"{used} counts for owner {owner}"
        self._read(mine)

    def deliver(self, who: int, which: int, n: int) -> None:
        """Seals blocks into a new ticket, or into a ticket that already has blocks."""
        mine = self._mine(who)
        items = self._written(mine, which, n)
        if not items:
            return
        paper = self.tickets[-1] if self.tickets and which % 2 else None
        if paper is not None:
            guess = replace(paper.id, secret=bytes(TICKET_SECRET_BYTES))
            refusal = self._once("-", mine, lambda lane: self.ledger.deliver(lane, items, guess, LONG_S))
            assert isinstance(refusal, errors.Gone), refusal
        ticket = None if paper is None else paper.id
        answer = self._once("deliver", mine, lambda lane: self.ledger.deliver(lane, items, ticket, LONG_S))
        assert isinstance(answer, tuple), answer
        if paper is None:
            paper = Paper(answer[0], {})
            self.tickets.append(paper)
        assert answer[0] == paper.id
        for item, used in zip(items, answer[1], strict=True):
            paper.held[used] = item.prefix_hash
            self.successes["dedup"] += item.ref != used
        held = {holder.epoch: holder.num_references for holder in self._now().holders}
        assert held[paper.id.epoch] == len(paper.held), "the ticket holds each block once"
        assert held[mine.caller.epoch] == len({*mine.held, *mine.unsealed}), "the holder keeps none of them"

    def _written(self, mine: Mine, which: int, n: int) -> list[SealItem]:
        """Writes some of the holder's unsealed blocks. Returns the items with which to seal them."""
        refs, name = mine.unsealed[: n % 4 + 1], "aab"[which % 3] + "xy"[which % 2]
        if not refs:
            return []
        hashes: list[bytes | None] = [*chain(name, len(refs))]
        if which % 7 == 3:
            hashes[-1] = hashes[0]  # two samples of one group with the same output
        if which % 5 == 4:
            hashes[-1] = None
        self.store.write(mine.caller, refs, hashes)
        mine.unsealed = mine.unsealed[len(refs) :]
        return [SealItem(ref, prefix_hash, QUOTAS.get(name)) for ref, prefix_hash in zip(refs, hashes, strict=True)]

    def acquire(self, who: int, which: int, n: int) -> None:
        mine, hashes = self._mine(who), chain("aab"[which % 3] + "xy"[which % 2], n % 4 + 1)
        num_indexed = indexed(self.ledger, [hashes])
        answer = self._once("acquire", mine, lambda lane: self.ledger.acquire(lane, [hashes]))
        assert isinstance(answer, list)
        refs = answer[0]
        assert len(refs) <= num_indexed
        self.successes["hit"] += len(refs)
        mine.held.update(zip(refs, hashes, strict=False))
        self._read(mine)

    def hand_over(self, who: int, n: int, keep: int) -> None:
        mine = self._mine(who)
        refs = list(mine.held)[: n % 6 + 1]
        moved = refs[keep % 3 :]
        if not refs:
            return
        answer = self._once("hand_over", mine, lambda lane: self.ledger.hand_over(lane, refs, LONG_S))
        assert isinstance(answer, TicketId), answer
        self.tickets.append(Paper(answer, {ref: mine.held[ref] for ref in refs}))
        assert self._once("release", mine, lambda lane: self.ledger.release(lane, moved)) == len(moved)
        for ref in moved:
            del mine.held[ref]

    def hand_over_unsealed(self, who: int) -> None:
        mine = self._mine(who)
        if mine.unsealed:
            refs = mine.unsealed[:1]
            assert isinstance(self._once("-", mine, lambda lane: self.ledger.hand_over(lane, refs)), errors.Stale)

    def claim(self, who: int, which: int) -> None:
        mine = self._mine(who)
        if not self.tickets:
            return
        paper = self.tickets.pop(which % len(self.tickets))
        guess = replace(paper.id, secret=bytes(TICKET_SECRET_BYTES))
        assert isinstance(self._once("-", mine, lambda lane: self.ledger.claim(lane, guess)), errors.Gone)
        answer = self._once("claim", mine, lambda lane: self.ledger.claim(lane, paper.id))
        assert isinstance(answer, tuple) and not answer[1] and set(answer[0]) == set(paper.held), answer
        mine.held.update(paper.held)
        self._read(mine)
        assert isinstance(self._once("-", mine, lambda lane: self.ledger.claim(lane, paper.id)), errors.Gone)

    def keep(self, which: int) -> None:
        """Extends a ticket's lease. Checks that a wrong secret or block is refused, and that no reference changes."""
        if not self.tickets:
            return
        paper = self.tickets[which % len(self.tickets)]
        before = self._now()
        guess = replace(paper.id, secret=bytes(TICKET_SECRET_BYTES))
        assert isinstance(_attempt(lambda: self.ledger.keep(guess)), errors.Gone)
        held = list(paper.held)
        others = [BlockRef(block, view.generation) for block, view in enumerate(before.blocks)]
        wrong = [*(ref for ref in others if ref not in held), *(BlockRef(b, g - 1) for b, g in held)]
        for ref in wrong[:: max(1, len(wrong) - 1)]:
            assert isinstance(_attempt(lambda ref=ref: self.ledger.keep(paper.id, [*held, ref])), errors.NotHolder)  # type: ignore[misc]
        self.ledger.keep(paper.id, held)
        assert self.store.moment() == before, "a lease is no reference"
        self.successes["keep"] += 1

    def release(self, who: int, n: int, unsealed: bool) -> None:
        mine = self._mine(who)
        refs = (mine.unsealed if unsealed else list(mine.held))[: n % 6 + 1]
        answer = self._once("release", mine, lambda lane: self.ledger.release(lane, refs))
        assert answer == len(refs), f"{answer} of {len(refs)} released"
        mine.unsealed = [ref for ref in mine.unsealed if ref not in refs]
        for ref in refs:
            mine.held.pop(ref, None)

    def die(self, who: int) -> None:
        """Expires a holder's lease and reaps the holder, which then continues as a zombie."""
        if len(self.holders) < 2:
            return
        mine = self.holders.pop(who % len(self.holders))
        self.store.expire(mine.caller.epoch)
        before = self._now()
        assert mine.caller.epoch in self._reap().reaped
        self._known = self.store.check(before)
        waiting = {block for block, slot in self._known.quarantine if slot == mine.caller.slot.number}
        assert waiting == {ref.block for ref in mine.unsealed}, "unsealed blocks belong in quarantine"
        self.zombies.append(mine)
        self.successes["reap"] += 1

    def ticket_dies(self, which: int) -> None:
        if self.tickets:
            paper = self.tickets.pop(which % len(self.tickets))
            self.store.expire(paper.id.epoch)
            before = self._now()
            self._reap()
            self._known = self.store.check(before)
            self.successes["ticket_reap"] += 1
            answer = self._once("-", self.holders[0], lambda lane: self.ledger.claim(lane, paper.id))
            assert isinstance(answer, errors.Gone)

    def zombie(self) -> None:
        """Checks I5: calls by a reaped holder have no effect."""
        for mine in self.zombies:
            before, caller = self._now(), mine.caller
            refs = [*mine.unsealed, *mine.held][:3]
            attempts: list[Callable[[], object]] = [
                lambda c=caller: self.ledger.alloc(c.lane(), 1),  # type: ignore[misc]
                lambda c=caller: self.ledger.acquire(c.lane(), [chain("ax", 1)]),  # type: ignore[misc]
                lambda c=caller, r=refs: self.ledger.seal(c.lane(), [SealItem(ref) for ref in r]),  # type: ignore[misc]
                lambda c=caller, r=refs: self.ledger.hand_over(c.lane(), r),  # type: ignore[misc]
                lambda c=caller, r=refs: self.ledger.deliver(c.lane(), [SealItem(ref) for ref in r]),  # type: ignore[misc]
                lambda c=caller: self.ledger.beat(c.epoch),  # type: ignore[misc]
                *(lambda c=caller, p=p: self.ledger.claim(c.lane(), p.id) for p in self.tickets[:1]),  # type: ignore[misc]
            ]
            for attempt in attempts:
                assert isinstance(_attempt(attempt), errors.Fenced), "I5"
            self.ledger.release(caller.lane(), refs)
            assert self.store.moment() == before, "I5: a fenced holder had an effect"
            self.successes["zombie"] += 1

    def revive(self) -> None:
        """Ends a zombie's process. Its quarantined blocks become free, and a new holder registers."""
        if not self.zombies:
            return
        mine = self.zombies.pop()
        mine.caller.slot.close()
        before, unsealed = self._now(), {ref.block for ref in mine.unsealed}
        waiting = {block for block, slot in before.quarantine if slot == mine.caller.slot.number}
        # A rebuild after the holder's death uses only the header, so the unsealed blocks that the holder had given up
        # also wait.
        assert waiting >= unsealed if mine.caller.ledger is not self.ledger else waiting == unsealed
        report = self._reap([mine.caller.slot.number])
        self.store.check(before)
        assert report.num_unquarantined == len(waiting)
        self.holders.append(Mine(self.store.caller()))
        self._known = None
        self.successes["unquarantine"] += report.num_unquarantined

    def stale(self, who: int) -> None:
        """Checks I10: a call with an old dataset generation or block generation has no effect."""
        mine = self._mine(who)
        old = copy.copy(self.ledger)
        old.dataset = "0" * 16
        before = self._now()
        assert isinstance(_attempt(lambda: old.alloc(mine.caller.lane(), 1)), errors.StaleDataset)
        past = [BlockRef(ref.block, ref.generation - 1) for ref in [*mine.held, *mine.unsealed]][:2]
        if past:
            assert isinstance(_attempt(lambda: self.ledger.hand_over(mine.caller.lane(), past)), errors.Stale)
            items = [SealItem(ref) for ref in past]
            assert isinstance(_attempt(lambda: self.ledger.seal(mine.caller.lane(), items)), errors.Stale)
            assert isinstance(_attempt(lambda: self.ledger.deliver(mine.caller.lane(), items)), errors.Stale)
            assert self.ledger.release(mine.caller.lane(), past) == 0
            self.successes["stale"] += 1
        assert self.store.moment() == before, "I10"

    def late(self, who: int) -> None:
        """Delivers a delayed release after the acquire that followed it."""
        mine = self._mine(who)
        full = [(ref, prefix_hash) for ref, prefix_hash in mine.held.items() if prefix_hash is not None]
        if not full:
            return
        ref, prefix_hash = full[0]
        self._once("release", mine, lambda lane: self.ledger.release(lane, [ref]))
        release = mine.caller.last
        answer = self._once("acquire", mine, lambda lane: self.ledger.acquire(lane, [[prefix_hash]]))
        mine.held.pop(ref)
        if not isinstance(answer, list) or not answer[0]:
            return
        mine.held[answer[0][0]] = prefix_hash
        before = self._now()
        again = _attempt(lambda: self.ledger.release(release, answer[0]))
        assert isinstance(again, errors.OutOfOrder), f"I8: a late release answered {again}"
        assert self.store.moment() == before, "I8: a late release had an effect"
        self.successes["late"] += 1

    def gap(self) -> None:
        """Checks that a sweep after a long gap, when every lease has expired, reaps no holder."""
        self._known = None
        self.store.expire(*(holder.epoch for holder in self.store.moment().holders))
        self.store.client.hset(self.ledger.tag + "meta", "last_reap", 1)
        report = self.ledger.reap()
        assert report.postponed and not report.reaped, "a sweep after a gap reaps the living"
        self._lease_all()
        self.store.check()
        self.successes["gap"] += 1

    def flushed(self) -> None:
        """Deletes the ledger and rebuilds it. The live holders then register their blocks again."""
        self.ledger.forget()
        self._build_anew()
        self.successes["rebuild"] += 1

    def older(self, who: int) -> None:
        """Restores a snapshot of the ledger that lacks a holder's last call. Checks that the holder's next beat detects
        this, and rebuilds the ledger.
        """
        mine, client = self._mine(who), self.store.client
        keys = list(client.scan_iter(f"{self.ledger.tag}*", count=1000))
        old = [(key, client.dump(key)) for key in keys]
        self.alloc(who, 1)
        number = mine.caller.number
        self.ledger.forget()
        for key, value in old:
            client.restore(key, 0, value)  # type: ignore[arg-type]
        refusal = _attempt(lambda: self.ledger.beat(mine.caller.epoch, LONG_S, number))
        assert isinstance(refusal, errors.StaleDataset), "an older snapshot is accepted"
        self._build_anew()
        self.successes["older"] += 1

    def _build_anew(self) -> None:
        self._known = None
        self.store.ledger = self.ledger.under(rebuild(self.store.client, self.store.arena, grace_s=0))
        self.store.check()
        self.tickets.clear()
        for mine in self.holders:
            caller, refs = mine.caller, [*mine.held, *mine.unsealed]
            past = [BlockRef(ref.block, ref.generation - 1) for ref in refs[:1]]
            refs = [*past, *refs]
            caller.ledger, caller.number = self.ledger, 0
            caller.epoch = self.ledger.register("caller", writer_slot=caller.slot.number, lease_s=LONG_S)
            self._known = None
            standings = self._once("assert", mine, lambda lane, refs=refs: self.ledger.assert_held(lane, refs))  # type: ignore[misc]
            expected = [Standing.LOST] * len(past) + [Standing.SEALED] * len(mine.held)
            expected += [Standing.UNSEALED] * len(mine.unsealed)
            assert standings == expected, f"what is held is not lost in a rebuild: {standings}"
            assert self._once("assert", mine, self.ledger.assert_all) is False
            self._read(mine)
        self._reap()

    def _lease_all(self) -> None:
        seconds, _ = self.store.client.time()  # type: ignore[misc]
        leases = {str(holder.epoch): (seconds + LONG_S) * 1000 for holder in self.store.moment().holders}
        if leases:
            self.store.client.zadd(self.ledger.tag + "leases", leases)

    def finish(self) -> None:
        """Checks I9: when all holders are gone, every block is FREE or CACHED."""
        self.store.expire(*(mine.caller.epoch for mine in self.holders), *(paper.id.epoch for paper in self.tickets))
        self._reap()
        gone = [*self.zombies, *self.holders]
        for mine in gone:
            mine.caller.slot.close()
        self._reap([mine.caller.slot.number for mine in gone])
        self.store.check()
        counts = self.store.moment().counts
        assert counts.free + counts.cached == counts.total, f"I9: {counts}"

    def _read(self, mine: Mine) -> None:
        """Checks I7: a reader gets the bytes that were sealed under a hash."""
        refs = [ref for ref, prefix_hash in mine.held.items() if prefix_hash is not None]
        assert self.store.arena.check_refs(refs), "a held block was reallocated"
        blocks = self._now().blocks
        for ref in refs:
            assert (self.store.arena.data[ref.block] == content(mine.held[ref])).all(), f"I7: {ref}"
            assert blocks[ref.block].state is BlockState.SEALED


def _check_quotas(now: Inspection) -> None:
    for owner, most in (now.quotas or {}).items():
        cached = (now.owned or {})[owner]
        assert len(cached) <= most, f"owner {owner} has {cached} CACHED, its quota is {most}"


def _attempt(operation: Callable[[], object]) -> object:
    try:
        return operation()
    except errors.LedgerError as refusal:
        return refusal
