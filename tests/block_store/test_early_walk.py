"""A random walk of early pulls, faults and pulls between two real stores. Every pull gives the right bytes, blocks that
an early pull holds are not evicted, and nothing stays held at the end.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import pytest

from common import convert
from common.ticket import Ticket
from common.types import BlockRef
from testing.chaos.rewriter import without_floors
from testing.ledger.hosts import Host
from testing.ledger.store import chain

NUM_BLOCKS, FLOOR = 26, 8
NUM_PROMPTS = 4
OPERATIONS = {"compute": 6, "pull_early": 6, "let_go": 0.5, "lapse": 0.1, "evict": 2, "finish": 0.7, "retry": 0.3}
"""The names of the operations of a walk, with their weights."""
FAULTS = {"": 8, "gone": 1, "wrong bytes": 1, "cancelled": 2}
LEAST = {
    "arrived": 60, "no room": 3, "gone": 5, "wrong bytes": 5, "cancelled": 10, "let go": 10, "lapsed": 3, "kept": 30,
    "finished": 30, "came early": 10, "retried": 5,
}  # fmt: skip
"""The minimum number of occurrences in a walk. A walk that rarely reaches deep states finds no bugs."""


@dataclass
class Prompt:
    """A prompt that is being computed on host A."""

    hashes: list[bytes]
    blocks: list[BlockRef] = field(default_factory=list)
    """The full blocks that are computed."""
    num_ticketed: int = 0
    calls: list[tuple[Any, list[bytes]]] = field(default_factory=list)
    """The open calls, each with the hashes of the blocks that it certainly holds."""


class Walk:
    """A random walk. Each operation counts what has happened in `seen`."""

    def __init__(self, a: Host, b: Host, seed: int) -> None:
        self.a, self.b = a, b
        self.rng = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.num_begun = 0
        self.prompts = [self.new_prompt() for _ in range(NUM_PROMPTS)]

    def run(self, num_steps: int) -> None:
        names, weights = list(OPERATIONS), list(OPERATIONS.values())
        for _ in range(num_steps):
            getattr(self, self.rng.choices(names, weights)[0])()
        for prompt in self.prompts:
            self.forget(prompt)
        for host in (self.a, self.b):
            host.assert_idle()

    def new_prompt(self) -> Prompt:
        self.num_begun += 1
        return Prompt(chain(chr(0x4E00 + self.num_begun), self.rng.randint(4, 7)))

    def compute(self) -> None:
        prompt = self.rng.choice(self.prompts)
        if hashes := prompt.hashes[len(prompt.blocks) :][: self.rng.randint(1, 3)]:
            prompt.blocks += self.a.fill(hashes)[0]

    def pull_early(self) -> None:
        """B pulls the blocks that have been computed since the last early pull of the prompt."""
        prompt, fault = self.rng.choice(self.prompts), self.rng.choices(list(FAULTS), list(FAULTS.values()))[0]
        part = slice(prompt.num_ticketed, len(prompt.blocks))
        if not (blocks := prompt.blocks[part]):
            return
        prompt.num_ticketed = len(prompt.blocks)
        self.a.held.share(blocks)
        ticket = self.a.hand_over([[blocks]])
        if fault == "cancelled":
            self.cancel(ticket)
            return
        victim, at = self.rng.choice(blocks).block, self.rng.randrange(100)
        self.a.arena.data[victim, at] ^= fault == "wrong bytes"
        if fault == "gone":
            self.a.end(ticket)
        try:
            call = self.b.pull_early(self.a, ticket)
        except grpc.RpcError as error:
            code = error.code()
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED or (code is grpc.StatusCode.ABORTED and fault), error
            self.seen["no room" if code is grpc.StatusCode.RESOURCE_EXHAUSTED else fault] += 1
        else:
            assert not fault or not call.num_tokens, "wrong bytes were accepted"
            self.seen["arrived"] += 1
            prompt.calls.append((call, prompt.hashes[part] if call.num_tokens else []))
        self.a.arena.data[victim, at] ^= fault == "wrong bytes"

    def cancel(self, ticket: Ticket) -> None:
        """An early pull is cancelled at a random moment."""
        call = self.b.begin_early(self.a, ticket)
        time.sleep(self.rng.uniform(0.0, 0.01))
        call.cancel()
        self.a.end(ticket)
        self.seen["cancelled"] += 1

    def let_go(self) -> None:
        if calls := self.rng.choice(self.prompts).calls:
            calls.pop(self.rng.randrange(len(calls)))[0].cancel()
            self.seen["let go"] += 1

    def lapse(self) -> None:
        """The leases of all early pulls at B end."""
        if not (tickets := self.tickets()):
            return
        ledger = self.b.held.holder.ledger
        while left := tickets & self.tickets():  # the store may extend the lease before it sweeps
            ledger.client.zadd(ledger.tag + "leases", dict.fromkeys(left, 1), xx=True)
            time.sleep(0.1)
        for prompt in self.prompts:
            prompt.calls = [(call, []) for call, _ in prompt.calls]
        self.seen["lapsed"] += 1

    def tickets(self) -> set[str]:
        return {str(holder.epoch) for holder in self.b.store.inspect().holders if holder.name == "ticket"}

    def evict(self) -> None:
        """All cached blocks of B are reallocated and overwritten."""
        with without_floors(self.b.held.holder.ledger):
            state = self.b.store.inspect()
            refs = self.b.held.alloc(state.free + state.cached)
            self.b.arena.data[[ref.block for ref in refs]] = 0xEE
            self.b.held.release(refs)
        held = [one for prompt in self.prompts for _, hashes in prompt.calls for one in hashes]
        assert all(self.b.held.present(held)), "a block that an early pull holds was evicted"
        self.seen["kept"] += bool(held)

    def finish(self) -> None:
        """A prompt is computed to its end, and B pulls all of it."""
        prompt = self.rng.choice(self.prompts)
        if missing := prompt.hashes[len(prompt.blocks) :]:
            prompt.blocks += self.a.fill(missing)[0]
        ticket = self.a.hand_over([[prompt.blocks + self.a.fill([], partial=True)[1]]])
        pulled = self.b.pull(self.a, ticket)
        copies = convert.ticket_from_pb(pulled.ticket)
        assert self.b.bytes_of(copies) == self.a.bytes_of(ticket)
        assert pulled.num_pulled + pulled.num_found == len(prompt.blocks) + 1
        num_early = sum(len(hashes) for _, hashes in prompt.calls)
        assert pulled.num_early_tokens >= 16 * num_early and pulled.num_tokens == 16 * pulled.num_pulled
        self.b.claim_and_release(copies)
        self.a.end(ticket)
        prompt.blocks.clear()
        self.forget(prompt)
        self.prompts[self.prompts.index(prompt)] = self.new_prompt()
        self.seen["finished"] += 1
        self.seen["came early"] += bool(num_early)

    def retry(self) -> None:
        """The prefill worker is lost, and the prompt is computed again, on a worker that has cached nothing."""
        prompt = self.rng.choice(self.prompts)
        self.seen["retried"] += bool(prompt.blocks)
        self.forget(prompt)
        self.prompts[self.prompts.index(prompt)] = Prompt(prompt.hashes)

    def forget(self, prompt: Prompt) -> None:
        self.a.held.release(prompt.blocks)
        for call, _ in prompt.calls:
            call.cancel()


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with TemporaryDirectory(dir="/dev/shm", prefix="ll-early-") as root:  # test runs of one machine share /dev/shm
        pair = Host(Path(root) / "a", 2 * NUM_BLOCKS), Host(Path(root) / "b", NUM_BLOCKS, "--pull-blocks", floor=FLOOR)
        yield pair
        for host in pair:
            host.stop()


def test_random_early_pulls_and_faults(hosts: tuple[Host, Host]) -> None:
    walk = Walk(*hosts, seed=5)
    walk.run(2000)
    assert not {name: (walk.seen[name], least) for name, least in LEAST.items() if walk.seen[name] < least}, walk.seen
