"""A decode worker seals the blocks of several steps in one call, and a sequence's blocks before the sequence leaves."""

from __future__ import annotations

import numpy as np
import pytest

from common.types import SamplingParams, StoppingParams
from decode_svc.running_blocks import SEAL_S
from decode_svc.scheduler import Group
from testing.decode import DecodeBench

GREEDY, STOPPING = SamplingParams(temperature=0.0), StoppingParams(max_tokens=200)
PROMPTS = [np.random.default_rng(100 + length).integers(5, 500, length).tolist() for length in (8, 9, 10, 11)]


class Clock:
    """The time that the worker sees."""

    def __init__(self, bench: DecodeBench) -> None:
        self.now = 1000.0
        bench.worker._blocks._clock = lambda: self.now


@pytest.fixture
def clock(small: DecodeBench) -> Clock:
    return Clock(small)


def steps(bench: DecodeBench, number: int) -> None:
    for _ in range(number):
        bench.worker.step()


def unsealed(bench: DecodeBench, groups: list[Group]) -> list[int]:
    """Returns the number of full blocks of each sequence that are not sealed."""
    return [s.num_computed // bench.block_size - s.num_sealed for group in groups for s in group.live]


def is_indexed(bench: DecodeBench, group: Group) -> list[bool]:
    """Returns, for each full block of a group's only sequence, whether its hash is in the ledger's index."""
    [sequence] = group.sequences
    return bench.held.present(sequence.hashes[1 : sequence.num_computed // bench.block_size + 1])


def test_one_call_seals_the_blocks_of_several_steps(
    small: DecodeBench, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last blocks of the four sequences become full in different steps. In SEAL_S, each fills two blocks."""
    groups = [small.submit(number, prompt, GREEDY, STOPPING) for number, prompt in enumerate(PROMPTS)]
    calls: list[int] = []
    seal = small.held.holder.seal
    monkeypatch.setattr(small.held.holder, "seal", lambda items: calls.append(len(items)) or seal(items))  # type: ignore[func-returns-value]
    most = 0
    for _ in range(10 * small.block_size):
        clock.now += SEAL_S / (2 * small.block_size - 0.5)
        small.worker.step()
        most = max(most, *unsealed(small, groups))
    assert most == 2 and calls == [1, 8, 8, 8, 8], "one call for two blocks of each sequence"
    for handle in range(len(PROMPTS)):
        small.worker.cancel(small.inbox.session, handle)
    assert all(all(is_indexed(small, group)) for group in groups)
    small.run()


def test_a_full_block_is_sealed_when_the_time_has_passed(small: DecodeBench, clock: Clock) -> None:
    group = small.submit(1, PROMPTS[0], GREEDY, STOPPING)
    steps(small, 4)
    assert unsealed(small, [group]) == [0], "the worker had sealed nothing for a long time"
    steps(small, 4)
    clock.now += 0.9 * SEAL_S
    steps(small, 1)
    assert unsealed(small, [group]) == [1]
    clock.now += 0.2 * SEAL_S
    steps(small, 1)
    assert unsealed(small, [group]) == [0] and is_indexed(small, group) == [True] * 4
    small.worker.cancel(small.inbox.session, 1)
    small.run()


def test_the_blocks_of_a_sequence_are_sealed_before_its_last_token(small: DecodeBench, clock: Clock) -> None:
    """The next turn of a chat may follow at once."""
    group = small.submit(1, PROMPTS[0], GREEDY, StoppingParams(max_tokens=9))
    steps(small, 7)
    told: list[list[bool]] = []
    heard = small.inbox.session.send
    small.inbox.session.send = lambda *message: (told.append(is_indexed(small, group)), heard(*message))[1]
    small.run()
    assert told[-1] == [True] * 4


def test_a_sequence_with_a_stale_block_is_not_sealed_when_it_leaves(small: DecodeBench, clock: Clock) -> None:
    group = small.submit(1, PROMPTS[0], GREEDY, STOPPING)
    other = small.submit(2, PROMPTS[2], GREEDY, STOPPING)
    steps(small, 7)
    assert unsealed(small, [group]) == [1]
    sequence, first = group.sequences[0], group.sequences[0].table[0].block
    sequence.extend_hashes(3, small.block_size, lambda parent, ids: bytes(32))
    small.arena.generations[first] += 1
    small.worker.cancel(small.inbox.session, 1)
    small.arena.generations[first] -= 1
    assert sequence.num_sealed == 2 and not small.held.present([bytes(32)])[0]
    steps(small, 5)
    assert not small.inbox.rejections and len(small.inbox.ids(2)[0]) == 1 + 12, "other groups continue"
    small.worker.cancel(small.inbox.session, 2)
    small.run()
    assert other.sequences[0].num_computed == len(PROMPTS[2]) + 12
