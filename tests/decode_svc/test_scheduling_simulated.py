"""Scheduler and preemption in a simulated worker, with a floor, a host tier, and other workers that take the remaining
blocks. The loop is that of the worker, but blocks are only counted. For any load, the oldest group continues and all
groups end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from common.group_need import GroupNeed
from common.kv_retention import KvRules, Retention
from common.types import SamplingParams, StoppingParams
from decode_svc.outputs import Rejection
from decode_svc.preemption import Preemption
from decode_svc.scheduler import DecodeScheduler, Group
from engine.sequence import Sequence

BLOCK = 4
FULL = KvRules(BLOCK)
STEP_S = 0.006
"""The simulated duration of a step in seconds. There are several steps between two attempts to resume."""


@dataclass(frozen=True)
class Request:
    at_step: int
    prompt_len: int
    lengths: tuple[int, ...]
    """The number of tokens after which each sample ends, at most `max_tokens`."""
    max_tokens: int
    priority: int

    @property
    def need(self) -> GroupNeed:
        return GroupNeed(self.prompt_len, self.max_tokens, len(self.lengths))


@dataclass
class Use:
    """The blocks of a group. Blocks that have left a window are released when another block is full."""

    rules: KvRules
    shared: int
    tail: int
    """1 for the prompt's partial block, until the samples have copied it."""
    own: dict[Sequence, int] = field(default_factory=dict)
    """The number of blocks of each sample after the shared ones, including released blocks."""
    released_at: dict[Sequence, int] = field(default_factory=dict)
    """The number of positions of each sample when it last released blocks."""

    sealed_tails: set[Sequence] = field(default_factory=set)
    """The samples that have come back from prefill and must copy their partial last block before they write."""
    num_copies: int = 0
    """The number of copies in this step. Their sources are still held."""

    @property
    def total(self) -> int:
        return sum(self._held(group) + self.num_copies for group in self.rules.groups)

    def _held(self, group: Retention) -> int:
        firsts = {s: group.first_needed(self.released_at[s], BLOCK) for s in self.own}
        own = sum(count - max(0, firsts[s] - self.shared) for s, count in self.own.items())
        return max(0, self.shared - min(firsts.values(), default=0)) + self.tail + own


class Tier:
    """A host tier with the part of the interface of `SwapSpace` that `Preemption` uses."""

    block_size, block_bytes = BLOCK, 1024

    def __init__(self, world: World, num_blocks: int) -> None:
        self._world = world
        self.num_groups = world.num_groups
        self.num_blocks = self.num_free = num_blocks
        self.swapped: dict[Group, int] = {}

    def need(self, group: Group) -> int:
        return self._world.uses[group].total

    def has_room(self, num_blocks: int) -> bool:
        return num_blocks <= self.num_free

    def swap_out(self, group: Group) -> bool:
        self.swapped[group] = self.need(group)
        self.num_free -= self.swapped[group]
        return True

    def swap_in(self, group: Group, spare: int) -> int | None:
        if self.need(group) + spare > self._world.room:
            return None
        num_blocks = self.need(group)
        self.drop(group)
        return num_blocks

    def drop(self, group: Group) -> None:
        self.num_free += self.swapped.pop(group, 0)


class World:
    """A simulated decode worker and its requests."""

    def __init__(
        self, num_blocks: int, floor: int, num_swap: int, requests: list[Request], rules: KvRules = FULL
    ) -> None:
        self.num_blocks, self.floor, self.rules = num_blocks, floor, rules
        self.num_groups = len(rules.groups)
        self.others = 0
        self.now = 0.0
        self.tier = Tier(self, num_swap)
        self.scheduler = DecodeScheduler(max_num_seqs=8, max_queue=100)
        tier: Any = self.tier
        self.preemption = Preemption(self.scheduler, tier, "swap", clock=lambda: self.now)
        self.coming = sorted(requests, key=lambda r: r.at_step)
        self.returning: list[tuple[Request, Group]] = []
        self.uses: dict[Group, Use] = {}
        self.requests: dict[Group, Request] = {}
        self.done: list[Request] = []

    @property
    def used(self) -> int:
        return sum(use.total for group, use in self.uses.items() if group not in self.tier.swapped)

    @property
    def room(self) -> int:
        """The number of blocks that the worker can allocate now."""
        return self.num_blocks - self.used - self.others

    @property
    def room_of_others(self) -> int:
        """The number of blocks that other workers can allocate without the worker's floor."""
        return self.num_blocks - max(self.floor, self.used) - self.others

    # --- arrivals

    def arrive(self, step: int) -> None:
        """Prefills groups, beginning with those that were given back. Prefill allocates the blocks, and the worker
        claims them.
        """
        while self.returning:
            request, group = self.returning[0]
            fresh = Group(group.handle, group.attempt + 1, list(group.live), request.priority, live=list(group.live))
            own = {s: self._own(request, s.num_computed) for s in group.live}
            use = Use(
                self.rules, request.prompt_len // BLOCK, 0, own, {s: s.num_computed for s in group.live},
                {s for s in group.live if s.num_computed % BLOCK},
            )  # fmt: skip
            if use.total > self.room_of_others:
                return
            self.returning.pop(0)
            self._enter(request, fresh, use)
        while self.coming and self.coming[0].at_step <= step:
            request = self.coming[0]
            live = [Sequence([], [], SamplingParams(), StoppingParams(), i) for i in range(len(request.lengths))]
            for sequence in live:
                sequence.num_computed = request.prompt_len
            use = Use(
                self.rules, request.prompt_len // BLOCK, int(request.prompt_len % BLOCK > 0), dict.fromkeys(live, 0),
                dict.fromkeys(live, request.prompt_len),
            )  # fmt: skip
            if use.total > self.room_of_others:
                return
            self.coming.pop(0)
            self._enter(request, Group(step, 0, live, request.priority, live=list(live)), use)

    def _own(self, request: Request, num_computed: int) -> int:
        return -(-num_computed // BLOCK) - request.prompt_len // BLOCK

    def _enter(self, request: Request, group: Group, use: Use) -> None:
        self.uses[group], self.requests[group] = use, request
        self.scheduler.add(group)

    # --- the worker's loop

    def step(self) -> list[Group]:
        """Runs one step. Returns the groups that advanced."""
        self.now += STEP_S
        oldest = min(self.scheduler.groups(), key=lambda g: g.rank, default=None)
        ran_before = set(self.scheduler.running)
        while (group := self.scheduler.in_the_way()) is not None:
            self.preempt(group)
        self.preemption.resume(self.preempt, self._needed)
        resumed = set(self.scheduler.running) - ran_before
        self.scheduler.admit(self._fits)
        admitted = set(self.scheduler.running) - ran_before - resumed
        plan: list[Group] = []
        for group in list(self.scheduler.running):
            if group not in self.uses or group in self.preemption:
                continue
            if not self._reserve(group):
                break
            plan.append(group)
        assert plan or not self.uses, "nobody goes on"
        assert oldest not in self.scheduler.running or oldest in plan, "the oldest waits"
        if ran_before and not admitted:
            assert resumed <= set(plan), "preempted again at once"
        for group in plan:
            self._go_on(group)
        return plan

    def preempt(self, group: Group) -> None:
        running = self.scheduler.running
        assert not running or running[0].rank < group.rank, "the oldest is a victim"
        self.uses[group].sealed_tails.clear()  # swapped-in blocks are copies
        if (rejection := self.preemption.preempt(group)) is not None:
            assert rejection is Rejection.GIVEN_BACK
            self._leave(group)
            self.returning.append((self.requests[group], group))
            self.returning.sort(key=lambda item: (item[0].priority, item[0].at_step))

    def _fits(self, group: Group) -> bool:
        return not self.scheduler.running or self.room >= 2 * len(group.live) * self.num_groups

    def _needed(self) -> int:
        return sum(len(self._needy(group)) for group in self.scheduler.running) * self.num_groups

    def _needy(self, group: Group) -> list[Sequence]:
        use, request = self.uses[group], self.requests[group]
        grows = {s for s in group.live if self._own(request, s.num_computed + 1) > use.own[s]}
        return [s for s in group.live if s in grows | use.sealed_tails]

    def _reserve(self, group: Group) -> bool:
        needing_block = self._needy(group)
        while len(needing_block) * self.num_groups > self.room:
            victim = self.scheduler.victim()
            if victim is None or victim is group:
                return False
            self.preempt(victim)
        use = self.uses[group]
        for sequence in needing_block:
            if sequence in use.sealed_tails:
                use.num_copies += 1
            else:
                use.own[sequence] += 1
        use.sealed_tails.clear()
        return True

    def _go_on(self, group: Group) -> None:
        use, request = self.uses[group], self.requests[group]
        use.tail = use.num_copies = 0
        for sequence in list(group.live):
            sequence.num_computed += 1
            if sequence.num_computed % BLOCK == 0:
                use.released_at[sequence] = sequence.num_computed
            if sequence.num_computed - request.prompt_len >= request.lengths[sequence.sample_index]:
                group.live.remove(sequence)
                del use.own[sequence]
        if not group.live:
            self._leave(group)
            self.done.append(request)

    def _leave(self, group: Group) -> None:
        self.scheduler.remove(group)
        self.preemption.drop(group)
        del self.uses[group]


@st.composite
def requests_of(draw: st.DrawFn, floor: int, rules: KvRules) -> Request:
    prompt_len, max_tokens = draw(st.integers(1, 24)), draw(st.integers(1, 30))
    width = draw(st.integers(1, 4))
    while GroupNeed(prompt_len, max_tokens, width).blocks(rules) > floor:
        width, max_tokens, prompt_len = max(1, width - 1), max(1, max_tokens // 2), max(1, prompt_len // 2)
    lengths = tuple(draw(st.integers(1, max_tokens)) for _ in range(width))
    return Request(draw(st.integers(0, 40)), prompt_len, lengths, max_tokens, draw(st.integers(0, 1)))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_oldest_goes_on_and_everything_ends(data: st.DataObject) -> None:
    windows = data.draw(st.sampled_from([(None,), (None, 5, 5), (9,), (None, 1)]), label="KV groups")
    rules = KvRules(BLOCK, tuple(map(Retention, windows)))
    floor = data.draw(st.integers(6 * len(windows), 20 * len(windows)), label="floor")
    num_blocks = data.draw(st.integers(2 * floor, 3 * floor), label="blocks")
    num_swap = data.draw(st.sampled_from([0, floor // 2, num_blocks]), label="host tier")
    requests = data.draw(st.lists(requests_of(floor, rules), min_size=1, max_size=16), label="requests")
    pressure = data.draw(st.lists(st.integers(0, num_blocks), min_size=1, max_size=20), label="others")
    run(World(num_blocks, floor, num_swap, requests, rules), pressure)


def run(world: World, pressure: list[int]) -> None:
    """Runs all requests to their end. `pressure` is the number of blocks that other workers take in each step, if
    available.
    """
    requests, num_swap = list(world.coming), world.tier.num_blocks
    limit = 50 + sum(max(r.lengths) for r in requests)  # enough for one group at a time, including waits for others
    for step in range(limit):
        if len(world.done) == len(requests):
            break
        world.others = 0
        if world.uses:
            world.others = min(pressure[step % len(pressure)], max(0, world.room_of_others))
        world.arrive(step)
        world.step()
        assert world.used + world.others <= world.num_blocks and 0 <= world.tier.num_free <= num_swap
    assert sorted(world.done, key=repr) == sorted(requests, key=repr)
    assert world.tier.num_free == num_swap and world.scheduler.idle and not world.uses


def test_who_came_first_runs_first_though_only_the_later_was_preempted() -> None:
    """Otherwise the later group would wait for blocks of the earlier one, and the earlier one for the start of the
    later one.
    """
    requests = [
        *(Request(0, 1, (1,), 1, 0) for _ in range(6)), Request(4, 1, (4,), 4, 0),
        *(Request(5, 9, (1,), 1, 1) for _ in range(2)), Request(5, 5, (1, 1), 1, 0),
    ]  # fmt: skip
    run(World(12, 6, 3, requests), [0, 6])


def test_waiting_groups_make_way_where_nothing_runs() -> None:
    world = World(40, 20, 40, [Request(0, 60, (8,), 8, 0), *(Request(2, 40, (4,), 4, 0) for _ in range(2))])
    world.arrive(0)
    world.step()
    [first] = world.scheduler.running
    world.preemption.preempt(first)
    world.arrive(2)
    assert world.used == 20 and world.room == 20
    world.others = 10
    assert world.step()[0] is first and world.preemption.counts.swapped_groups == 2


def test_the_simulation_swaps_resumes_and_gives_back() -> None:
    """Checks that swaps, resumptions and give-backs occur in the test above."""
    requests = [Request(i, 8, (20, 20), 20, 0) for i in range(8)]
    for num_swap, swaps in ((40, True), (0, False)):
        world = World(40, 16, num_swap, requests)
        for step in range(400):
            world.arrive(step)
            world.step()
        counts = world.preemption.counts
        assert len(world.done) == len(requests)
        assert (counts.swapped_groups > 0) is swaps is (counts.resumed_groups > 0)
        assert (counts.given_back_groups > 0) is not swaps
