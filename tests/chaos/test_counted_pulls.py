"""Pulls without a fault, at the smallest size: what has been copied, according to answers and counters, and tests that
the comparison can fail. `python -m testing.chaos --scenario pull-none pull-early-none` has 200 requests.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from testing.chaos.counted_pulls import (
    NEVER_EARLY,
    Conversation,
    Part,
    Turn,
    fewest_tokens,
    judge,
    make_conversations,
    talk,
)
from testing.chaos.pulls import EARLY_FLAGS, MAX_MODEL_LEN
from testing.chaos.report import Report
from testing.chaos.run import Run
from testing.two_hosts import TwoHosts, namespaces_work


@pytest.fixture(scope="module")
def conversations(run: Run) -> list[Conversation]:
    return make_conversations(replace(run, trials=20))


def report_on(part: Part) -> Report:
    judge(report := Report("pull-none", 20, 5), part)
    return report


@pytest.mark.parametrize("early", [False, True])
async def test_answers_and_counters_agree_on_what_was_copied(
    run: Run, conversations: list[Conversation], early: bool
) -> None:
    flags = EARLY_FLAGS if early else NEVER_EARLY
    with TwoHosts(run.model, namespaces=namespaces_work(), max_model_len=MAX_MODEL_LEN, flags=flags) as hosts:
        alone, beside = [await talk(hosts, conversations, concurrency) for concurrency in (1, 12)]
        hosts.assert_nothing_held()
    for part in (alone, beside):
        assert report_on(part).good, report_on(part).text()
        assert (part.counts.early_tokens > 0) == early
    assert not report_on(replace(alone, counts=replace(alone.counts, blocks=alone.counts.blocks + 1))).good
    assert not report_on(replace(alone, counts=replace(alone.counts, bytes=alone.counts.bytes + 1))).good
    for index, (turn, answer) in enumerate(alone.asked):
        more = replace(answer, transferred_tokens=answer.transferred_tokens + 16)
        changed = [*alone.asked[:index], (turn, more), *alone.asked[index + 1 :]]
        assert not report_on(replace(alone, asked=changed)).good, "one answer reports a block too many"


def test_the_fewest_tokens_count_a_full_block_once_and_a_partial_one_each_time(run: Run) -> None:
    case = replace(run.book[0], prompt_ids=tuple(range(40)))
    longer = replace(case, prompt_ids=tuple(range(50)))
    assert fewest_tokens([Turn(case, "a")]) == 40
    assert fewest_tokens([Turn(case, "a"), Turn(case, "a"), Turn(longer, "a")]) == 32 + 8 + 8 + 16 + 2
    assert fewest_tokens([Turn(case, "a"), Turn(case, "b")]) == 80, "another salt shares nothing"
    assert fewest_tokens([Turn(longer, "a", num_cached=32)]) == 18
