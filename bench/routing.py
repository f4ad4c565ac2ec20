"""Measures the cost of the gateway router's choices with simulated hosts (`python -m bench.routing`).

Each host has an arena, a prefill worker and a decode worker. Chats grow turn by turn, so arenas cache prefixes. The
router and its cost estimates are real; workers, links and time are simulated. The router has the information of a
gateway: its own dispatches, reported rates, cached prefixes, and the copies that have been made.

Regret is the time that a request's route loses compared with the best route at the moment of the request's arrival. The
best route is found by computing the outcome of all routes. The policies "copy" and "compute" are the same router with a
fixed estimate for a copy: no time, or a very long time.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from common.types import Role, WorkerLoad, WorkerRecord
from gateway.fleet.costs import RouteCosts
from gateway.fleet.routing import Asked, Route, Router
from looseleaf.simulation.trace import MOONCAKE_BLOCK, read

PREFILL_TOKENS_PER_S = 4_000.0
MAX_NUM_SEQS = 16
TOKEN_S = 0.02
"""The duration of a decode step with one sequence, in seconds."""
SLOWER_IN_FULL_BATCH = 0.5
COPY_START_S = 0.01
CACHED_CHUNKS = 4_000
"""The size of an arena, in chunks of prompts."""
CHUNK = 64
LINKS = (250.0, 2_000.0, 16_000.0, 128_000.0)
"""The speeds of links, in tokens of KV per second."""
NEVER_S = 1e6


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request, with its arrival time in seconds, its prompt as ids of chunks, and the number of tokens to decode."""

    at: float
    chunks: tuple[int, ...]
    chunk_tokens: int
    num_decoded: int


@dataclass(slots=True)
class Host:
    """The true state of a host."""

    arena_id: str
    prefill_free_at: float = 0.0
    decode_ends: list[float] = field(default_factory=list)
    """The times at which the running and waiting groups will end, sorted."""
    cached: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def num_cached(self, prompt: Prompt) -> int:
        """Returns the number of tokens of the prompt's cached prefix."""
        found = itertools.takewhile(self.cached.__contains__, prompt.chunks)
        return sum(1 for _ in found) * prompt.chunk_tokens

    def cache(self, prompt: Prompt) -> None:
        for chunk in prompt.chunks:
            self.cached[chunk] = None
            self.cached.move_to_end(chunk)
        while len(self.cached) > CACHED_CHUNKS:
            self.cached.popitem(last=False)

    def decode(self, ready_at: float, num_decoded: int) -> tuple[float, float]:
        """Returns (start, end) of decoding, for a group that is ready at `ready_at`."""
        later = [end for end in self.decode_ends if end > ready_at]
        begins = later[-MAX_NUM_SEQS] if len(later) >= MAX_NUM_SEQS else ready_at
        share = min(1.0, len(later) / MAX_NUM_SEQS)
        return begins, begins + num_decoded * TOKEN_S * (1.0 + SLOWER_IN_FULL_BATCH * share)


class FixedCosts(RouteCosts):
    """Cost estimates in which every copy takes the same time."""

    def __init__(self, copy_s: float) -> None:
        super().__init__()
        self._fixed_s = copy_s

    def copy_s(self, source: str, destination: str, num_tokens: int, now: float) -> float:
        return 0.0 if source == destination else self._fixed_s


class Fleet:
    """A simulation of hosts, links and one gateway's router."""

    def __init__(self, num_hosts: int, link_tokens_per_s: float, costs: RouteCosts) -> None:
        self.hosts = {f"a{i}": Host(f"a{i}") for i in range(num_hosts)}
        self.losses: list[float] = []
        """The loss of each request in seconds: the time until its last token, minus the time that decoding would take
        alone.
        """
        self.regrets: list[float] = []
        self.num_copied = 0
        self._link = link_tokens_per_s
        self._link_free_at: dict[tuple[str, str], float] = {}
        self._router = Router()
        self._router.costs = costs
        self._router.stores = dict.fromkeys(self.hosts, True)
        self._router.update(_records(self.hosts), 0.0)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()

    def run(self, prompts: list[Prompt]) -> None:
        for prompt in prompts:
            self._at(prompt.at, partial(self._arrive, prompt))
        while self._events:
            now, _, event = heapq.heappop(self._events)
            event(now)

    def _at(self, at: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at, next(self._order), event))

    def _arrive(self, prompt: Prompt, now: float) -> None:
        cached = {arena_id: host.num_cached(prompt) for arena_id, host in self.hosts.items()}
        asked = Asked(_num_tokens(prompt), cached)
        prefill = self._router.pick_prefill(asked, now, _always)
        assert prefill is not None
        route = Route(prefill.record, asked)
        decode = self._router.pick_decode(route, now, _always)
        assert decode is not None
        source, destination = prefill.record.arena_id, decode.record.arena_id
        best = min(self._lost_s(prompt, p, d, now) for p in self.hosts for d in self.hosts)
        self.regrets.append(self._lost_s(prompt, source, destination, now) - best)
        host = self.hosts[source]
        host.prefill_free_at = self._prefilled_at(prompt, source, now)
        prefill.worker.dispatched_tokens += asked.num_tokens

        def prefilled(then: float) -> None:
            prefill.worker.dispatched_tokens -= asked.num_tokens
            host.cache(prompt)
            self._hand_over(prompt, route, then)

        self._at(host.prefill_free_at, prefilled)

    def _hand_over(self, prompt: Prompt, route: Route, now: float) -> None:
        decode = self._router.pick_decode(route, now, _always)
        assert decode is not None
        source, destination = route.prefill.arena_id, decode.record.arena_id
        host, ready_at = self.hosts[destination], now
        if source != destination:
            self.num_copied += 1
            ready_at = self._link_free_at[source, destination] = self._copied_at(prompt, source, destination, now)
            num_tokens = _num_tokens(prompt) - host.num_cached(prompt)
            self._router.costs.note_copy(source, destination, num_tokens, ready_at - now, ready_at)
            host.cache(prompt)
        _, ends_at = host.decode(ready_at, prompt.num_decoded)
        host.decode_ends = sorted([*(end for end in host.decode_ends if end > now), ends_at])
        self.losses.append(ends_at - prompt.at - prompt.num_decoded * TOKEN_S)
        decode.worker.dispatched_sequences += 1

        def ended(then: float) -> None:
            decode.worker.dispatched_sequences -= 1
            self._router.costs.note_decode(then - now, prompt.num_decoded)

        self._at(ends_at, ended)

    # --- the true outcome of a route

    def _lost_s(self, prompt: Prompt, source: str, destination: str, now: float) -> float:
        """Returns the time in seconds that this route would lose if no other request arrived."""
        ready_at = self._prefilled_at(prompt, source, now)
        if source != destination:
            ready_at = self._copied_at(prompt, source, destination, ready_at)
        _, ends_at = self.hosts[destination].decode(ready_at, prompt.num_decoded)
        return ends_at - now - prompt.num_decoded * TOKEN_S

    def _prefilled_at(self, prompt: Prompt, arena_id: str, now: float) -> float:
        host = self.hosts[arena_id]
        missing = max(1, _num_tokens(prompt) - host.num_cached(prompt))
        return max(now, host.prefill_free_at) + missing / PREFILL_TOKENS_PER_S

    def _copied_at(self, prompt: Prompt, source: str, destination: str, now: float) -> float:
        missing = max(1, _num_tokens(prompt) - self.hosts[destination].num_cached(prompt))
        return max(now, self._link_free_at.get((source, destination), 0.0)) + COPY_START_S + missing / self._link


def _always(record: WorkerRecord) -> bool:
    return True


def _num_tokens(prompt: Prompt) -> int:
    return len(prompt.chunks) * prompt.chunk_tokens


def _records(arena_ids: Iterable[str]) -> list[WorkerRecord]:
    roles: tuple[Role, Role] = ("prefill", "decode")
    load = WorkerLoad(prompt_tokens_per_s=PREFILL_TOKENS_PER_S)
    return [
        WorkerRecord(f"{role} {a}", role, f"{a}:{role}", "m", a, 16, "p", "00", 1 << 20, MAX_NUM_SEQS, load=load)
        for a in arena_ids
        for role in roles
    ]


def chats(seed: int, count: int, requests_per_s: float) -> list[Prompt]:
    """Returns the first `count` turns of chats that begin at random times and grow by 64 to 1,024 tokens per turn."""
    rng, names = random.Random(seed), itertools.count()
    prompts: list[Prompt] = []
    at = 0.0
    while len(prompts) < count:
        at += rng.expovariate(requests_per_s / 5)
        then, history = at, [next(names) for _ in range(rng.randint(8, 64))]
        for _ in range(rng.randint(1, 9)):
            num_decoded = rng.randint(50, 350)
            prompts.append(Prompt(then, tuple(history), CHUNK, num_decoded))
            history += [next(names) for _ in range(rng.randint(1, 16))]
            then += num_decoded * TOKEN_S * 2 + rng.expovariate(1 / 10)
    return sorted(prompts, key=lambda prompt: prompt.at)[:count]


def trace(path: Path, count: int, requests_per_s: float) -> list[Prompt]:
    """Returns the first `count` requests of a Mooncake trace, at the given mean rate. Their prompts consist of chunks
    of 512 tokens.
    """
    found = read(path, count=count, rate=requests_per_s)
    return [Prompt(r.at_s, tuple(name for name, _ in r.runs), MOONCAKE_BLOCK, r.output_len) for r in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--rate", type=float, default=5.0, help="requests per second")
    parser.add_argument("--links", type=float, nargs="+", default=LINKS, help="tokens of KV per second")
    parser.add_argument("--trace", type=Path, help="a Mooncake trace (JSON lines) instead of made-up chats")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    if asked.trace is None:
        prompts = chats(asked.seed, asked.requests, asked.rate)
    else:
        prompts = trace(asked.trace, asked.requests, asked.rate)
    print(f"{len(prompts)} requests, {asked.hosts} hosts, prefill {PREFILL_TOKENS_PER_S:g} tokens/s each\n")
    print("| link, tokens/s | router | copied | lost, mean s | p99 s | regret, mean s | p99 s |")
    print("|---|---|---|---|---|---|---|")
    policies: dict[str, Callable[[], RouteCosts]] = {
        "measured": RouteCosts,
        "copy": lambda: FixedCosts(0.0),
        "compute": lambda: FixedCosts(NEVER_S),
    }
    for link, (name, costs) in itertools.product(asked.links, policies.items()):
        fleet = Fleet(asked.hosts, link, costs())
        fleet.run(prompts)
        cells = [f"{link:g}", name, f"{fleet.num_copied / len(prompts):.0%}"]
        cells += [f"{value:.3f}" for values in (fleet.losses, fleet.regrets) for value in _mean_p99(values)]
        print(f"| {' | '.join(cells)} |")


def _mean_p99(values: list[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.quantiles(values, n=100)[-1]


if __name__ == "__main__":
    main()
