"""The scenarios `pull-none` and `pull-early-none`: prefill on host A, decode on host B, and no fault. They compare all
answers with the oracle's, and check that the answers and the gateway's counters agree on what has been copied.

A conversation has one or two turns. Every request runs once alone, and once beside eleven others.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from looseleaf.client import AsyncClient
from testing.chaos.book import MAX_MODEL_LEN, Case, make_oracle, random_ids, sampling_of, solve
from testing.chaos.pulls import EARLY_FLAGS, IDLE_S, RETRIED
from testing.chaos.report import Report
from testing.chaos.run import Run
from testing.chaos.traffic import Answer, ask
from testing.oracle import Oracle
from testing.two_hosts import TwoHosts, namespaces_work

BLOCK_SIZE = 16
WIDTH = 4
"""The number of samples or beams of a group."""
KINDS = ("greedy", "drawn", "samples", "beams")
COLD_LENGTHS = (40, 300)
TAIL_LENGTHS = (1, 60)
OUTPUT_LENGTHS = (16, 48)
SHARED_LENGTHS = (15, 16, 17, 48, 100, 160)
"""The lengths of the prefixes that requests share. Bookkeeping errors tend to occur at block boundaries."""
SHARED = "shared"
"""The salt of the requests that share prefixes."""
NUM_PER_ROUND = 10
"""The number of requests that `_round` makes."""
NUM_BLOCKS = 8192
"""Enough blocks for all requests, so that no cached block is evicted."""
CONCURRENCY = (1, 12)
NEVER_EARLY = {"gateway": {"early_pull_tokens": 0}}
EARLY_TOKENS = "looseleaf_early_pulled_tokens_total"


@dataclass(frozen=True, slots=True)
class Turn:
    """A request of a conversation."""

    case: Case
    salt: str
    num_cached: int = 0
    """The number of the prompt's tokens that the previous turn has left in full blocks on B."""


Conversation = tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Counts:
    """Counters of the gateway."""

    pulls: int
    blocks: int
    bytes: int
    early_tokens: int
    lost: int
    """The number of attempts that were lost."""

    def since(self, before: Counts) -> Counts:
        """Returns the increase of each counter since `before`."""
        return Counts(
            self.pulls - before.pulls, self.blocks - before.blocks, self.bytes - before.bytes,
            self.early_tokens - before.early_tokens, self.lost - before.lost,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Part:
    """All requests at one concurrency, and what they added to the counters."""

    concurrency: int
    asked: Sequence[tuple[Turn, Answer]]
    counts: Counts
    block_bytes: int


def make_conversations(run: Run) -> list[Conversation]:
    """Returns conversations with at least `run.trials` requests in all, in random order."""
    rng, oracle = run.rng, make_oracle(run.model)
    heads = [random_ids(rng, max(SHARED_LENGTHS)) for _ in range(3)]
    found = [each for number in range(-(-run.trials // NUM_PER_ROUND)) for each in _round(rng, oracle, heads, number)]
    rng.shuffle(found)
    return found


def _round(rng: random.Random, oracle: Oracle, heads: Sequence[tuple[int, ...]], number: int) -> Iterator[Conversation]:
    """Yields conversations with ten requests. In four of them, a prompt without a cached prefix is decoded in the four
    ways. Two of these have a second turn. The others share prefixes.
    """
    cold = random_ids(rng, rng.randint(*COLD_LENGTHS))
    for kind in KINDS:
        first = Turn(_solved(rng, oracle, cold, kind), f"{number}/{kind}")
        yield (first, _second(rng, oracle, first)) if kind in ("greedy", "drawn") else (first,)
    for kind in KINDS:
        head = rng.choice(heads)[: rng.choice(SHARED_LENGTHS)]
        yield (Turn(_solved(rng, oracle, head + random_ids(rng, rng.randint(*TAIL_LENGTHS)), kind), SHARED),)


def _second(rng: random.Random, oracle: Oracle, first: Turn) -> Turn:
    [output] = first.case.expected
    prompt = (*first.case.prompt_ids, *output, *random_ids(rng, rng.randint(*TAIL_LENGTHS)))
    num_computed = len(first.case.prompt_ids) + len(output) - 1  # the KV of the last token is not computed
    return Turn(_solved(rng, oracle, prompt, "greedy"), first.salt, num_computed // BLOCK_SIZE * BLOCK_SIZE)


def _solved(rng: random.Random, oracle: Oracle, prompt: tuple[int, ...], kind: str) -> Case:
    return solve(oracle, prompt, sampling_of(kind, rng, WIDTH), rng.randint(*OUTPUT_LENGTHS))


def fewest_tokens(turns: Iterable[Turn]) -> int:
    """Returns the number of token positions that must be copied for these requests, in any order, if every full block
    is copied once, and not at all if the previous turn has left it on B.
    """
    full, total = set[tuple[str, tuple[int, ...]]](), 0
    for turn in turns:
        prompt = turn.case.prompt_ids
        ends = range(turn.num_cached + BLOCK_SIZE, len(prompt) + 1, BLOCK_SIZE)
        full.update((turn.salt, prompt[:end]) for end in ends)
        total += len(prompt) % BLOCK_SIZE  # a partial block has no name under which it could be found
    return total + len(full) * BLOCK_SIZE


async def talk(hosts: TwoHosts, conversations: Sequence[Conversation], concurrency: int) -> Part:
    """Runs the conversations, `concurrency` at a time, with salts of their own."""
    left, asked, before = iter(conversations), list[tuple[Turn, Answer]](), counts_of(hosts)

    async def work(client: AsyncClient) -> None:
        for conversation in left:
            for turn in conversation:
                asked.append((turn, await ask(client, turn.case, f"{concurrency}/{turn.salt}", timeout_s=120.0)))

    async with AsyncClient(hosts.grpc) as client:
        await asyncio.gather(*(work(client) for _ in range(concurrency)))
    return Part(concurrency, asked, counts_of(hosts).since(before), hosts.inspect(1).block_bytes)


def counts_of(hosts: TwoHosts) -> Counts:
    names = [f"looseleaf_{name}_total" for name in ("pulls", "pulled_blocks", "pulled_bytes")]
    return Counts(*(round(hosts.metric(name)) for name in (*names, EARLY_TOKENS, RETRIED)))


def judge(report: Report, part: Part) -> None:
    """Compares the answers with the oracle's, and what they report as copied with the counters."""
    answers, counts = [answer for _, answer in part.asked], part.counts
    total, moved = len(answers), [answer.transferred_tokens for answer in answers]
    num_blocks = sum(-(-num_tokens // BLOCK_SIZE) for num_tokens in moved)
    report.told("requests at a time", f"{part.concurrency}")
    report.none("answers that differ from the oracle's", sum(not a.right for a in answers), total, "requests")
    report.none("requests that did not complete", sum(a.error is not None for a in answers), total, "requests")
    report.none("attempts that were lost", counts.lost, total, "requests")
    report.exactly("pulls", counts.pulls, total)
    _judge_tokens(report, part)
    report.exactly("blocks copied, according to the gateway", counts.blocks, num_blocks)
    report.exactly("bytes copied, according to the gateway", counts.bytes, num_blocks * part.block_bytes)
    _judge_groups(report, part)
    report.told("tokens copied during prefill", f"{counts.early_tokens:,}")


def _judge_tokens(report: Report, part: Part) -> None:
    """Checks that every full block is copied once, and counts for one request."""
    copied = sum(answer.transferred_tokens for _, answer in part.asked)
    report.exactly("tokens copied, according to the answers", copied, fewest_tokens(turn for turn, _ in part.asked))
    more = sum(answer.transferred_tokens > len(turn.case.prompt_ids) - turn.num_cached for turn, answer in part.asked)
    report.none("requests that copied more than they can lack", more, len(part.asked), "requests")


def _judge_groups(report: Report, part: Part) -> None:
    """Checks that a group copies its prompt once."""
    groups = [(turn, answer) for turn, answer in part.asked if turn.case.sampling.num_sequences == WIDTH]
    cold = [(turn, answer) for turn, answer in groups if turn.salt != SHARED]
    other = sum(answer.transferred_tokens != len(turn.case.prompt_ids) for turn, answer in cold)
    report.none(f"groups of {WIDTH} that copied other than one prompt", other, len(cold), "groups")


def pull_none(run: Run, *, early: bool = False) -> Report:
    """Runs the conversations at each concurrency. If `early` is True, even short prompts are copied early, and if not,
    none are.
    """
    report, conversations = run.report("pull-early-none" if early else "pull-none"), make_conversations(run)
    with TwoHosts(
        run.model, namespaces=namespaces_work(), num_blocks=NUM_BLOCKS, max_model_len=MAX_MODEL_LEN,
        flags=EARLY_FLAGS if early else NEVER_EARLY,
    ) as hosts:  # fmt: skip
        for concurrency in CONCURRENCY:
            judge(report, asyncio.run(talk(hosts, conversations, concurrency)))
        hosts.assert_nothing_held(IDLE_S)
    return report


def pull_early_none(run: Run) -> Report:
    return pull_none(run, early=True)


SCENARIOS = {"pull-none": pull_none, "pull-early-none": pull_early_none}
