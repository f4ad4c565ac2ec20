"""A scenario whose arena has only 30 % of the blocks that the concurrent requests may need. Its four parts, of equal
lengths, run one or two pairs of workers with swapping or with giving back. Every answer must be the oracle's, unless
the request is refused because no decode worker could hold it. The time between two answers must not exceed QUIET_S.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Literal

from common.group_need import GroupNeed
from common.kv_retention import KvRules
from common.types import SamplingParams
from testing.chaos.book import Case
from testing.chaos.kills import BACK
from testing.chaos.report import Report, Row, percentile
from testing.chaos.run import Run, judge
from testing.chaos.stack import Plan, Stack
from testing.chaos.traffic import Answer, Traffic
from testing.system import assert_nothing_held

Mode = Literal["swap", "give-back"]
SHARE = 0.3
"""The share of the needed blocks that the arena has."""
CLIENTS = 24
"""The number of clients per decode worker."""
PRIORITIES = (0, 0, 1)
"""The priorities of the requests. About a third of the requests have a lower priority than the others."""
MAX_MODEL_LEN = 432
BLOCK_SIZE = 16
QUIET_S = 30.0
"""The time in seconds without an answer after which the system counts as stuck."""
TOO_WIDE = Case(tuple(range(20, 40)), SamplingParams(num_sequences=16), 256, ())
"""A case that needs more than 256 blocks, so it must be refused."""
REFUSAL = re.compile(r"^InvalidArgument: .*\b(n|beam_width|max_tokens)\b.* need \d+ blocks of KV; the limit .* is \d+$")
SWAPPED = r"no block left: group \d+, (\d+) blocks, is swapped out \(([\d.]+) ms\)"
RESUMED = r"group \d+ is back: (\d+) blocks copied in ([\d.]+) ms, waited ([\d.]+) s"
GIVEN_BACK = r"no block left: group \d+, (\d+) blocks, is given back to prefill"


def pressure(run: Run) -> Report:
    """Runs for `trials` seconds, in four parts."""
    report = run.report("pressure")
    for workers in (1, 2):
        for mode in ("swap", "give-back"):
            pressure_part(run, report, workers, mode, run.trials / 4)
    return report


def pressure_part(run: Run, report: Report, workers: int, mode: Mode, seconds: float) -> None:
    """Runs one mode of preemption with the given number of workers per role."""
    crowd = replace(run, book=[*run.book, TOO_WIDE], concurrency=CLIENTS * workers)
    needed = crowd.concurrency * fmean(map(blocks_needed, run.book))
    plan = Plan(int(SHARE * needed), MAX_MODEL_LEN, workers=workers, preemption=mode)
    report.told(
        f"{mode}, {workers} decode: {seconds:.0f} s, {crowd.concurrency} clients",
        f"{plan.num_blocks} blocks, {SHARE:.0%} of {needed:.0f}",
    )
    with crowd.stack(plan) as stack:
        floor = max(holder.floor for holder in stack.inspect().holders if holder.name.startswith("decode"))
        with crowd.traffic(stack, priorities=PRIORITIES) as traffic:
            quiet = _watch(traffic, seconds)
            if quiet > QUIET_S:
                _last_words(stack)
            answers = traffic.stop()
        report.at_most("longest time without any answer", quiet, QUIET_S, "s")
        _judge_answers(report, stack, answers, floor)
        _tell_preemption(report, stack, mode)
        _judge_rest(report, stack)


def blocks_needed(case: Case) -> int:
    """Returns the largest number of blocks that a request may need."""
    return GroupNeed(len(case.prompt_ids), case.max_tokens, case.sampling.width).blocks(KvRules(BLOCK_SIZE))


def _watch(traffic: Traffic, seconds: float) -> float:
    """Waits for the given time, or until no answer has arrived for QUIET_S. Returns the longest time without an answer,
    in seconds.
    """
    last, end, longest, seen = time.monotonic(), time.monotonic() + seconds, 0.0, 0
    while (now := time.monotonic()) < end and longest <= QUIET_S:
        if len(traffic.answers) > seen:
            seen, last = len(traffic.answers), now
        longest = max(longest, now - last)
        time.sleep(0.1)
    return longest


def _last_words(stack: Stack) -> None:
    for line in stack.tail():
        print(f"  {line.service}: {line.text}", file=sys.stderr)


def _judge_answers(report: Report, stack: Stack, answers: Sequence[Answer], floor: int) -> None:
    """Checks that the requests that do not fit, and no others, were refused, and that all other requests were answered
    correctly.
    """
    refused = [answer for answer in answers if answer.error is not None and REFUSAL.match(answer.error)]
    large = {id(answer) for answer in answers if blocks_needed(answer.case) > floor}
    wrongly = sum(id(answer) not in large or answer.num_tokens > 0 for answer in refused)
    report.none("refused though they fit, or too late", wrongly, len(refused), "refused")
    report.none("let in although they can never fit", len(large) - len(refused) + wrongly, len(large), "too large")
    out = {id(answer) for answer in refused}
    let_in = [answer for answer in answers if id(answer) not in out]
    judge(report, stack, let_in)
    groups = sum(answer.case.sampling.width > 1 for answer in let_in)
    report.told("  of these, of several samples or beams", f"{groups:,} of {len(let_in):,}")
    gaps = [answer.longest_gap_s for answer in let_in if answer.case.streamed]
    report.told("longest wait for a token (no beams), p50, most", f"{percentile(gaps, 0.5):.2f} s, {max(gaps):.2f} s")
    whole = [answer.ended - answer.began for answer in let_in]
    report.told("whole request p50, most", f"{percentile(whole, 0.5):.2f} s, {max(whole):.2f} s")


def _tell_preemption(report: Report, stack: Stack, mode: Mode) -> None:
    out, back = list(_numbers(stack, SWAPPED)), list(_numbers(stack, RESUMED))
    away, again = list(_numbers(stack, GIVEN_BACK)), [found[1] for found in _numbers(stack, BACK)]
    if mode == "swap":
        report.at_least("groups swapped out", len(out), 1)
        report.at_least("groups resumed", len(back), 1)
        report.told("  copied out, mean", _mean_copy(out))
        report.told("  copied back, mean", _mean_copy(back))
        waits = [found[2] for found in back]
        report.told("  swapped, p50, most", f"{percentile(waits, 0.5):.2f} s, {max(waits, default=0.0):.2f} s")
        report.told("groups given back", str(len(away)))
    else:
        report.at_least("groups given back", len(away), 1)
        report.none("groups swapped out", len(out), len(out) + len(away), "preempted")
    report.told("  prefilled again, by the gateway", f"{stack.metric('looseleaf_requests_given_back_total'):.0f}")
    report.told(
        "  tokens computed again for one, p50, most", f"{percentile(again, 0.5):.0f}, {max(again, default=0):.0f}"
    )


def _numbers(stack: Stack, pattern: str) -> Iterator[list[float]]:
    return (list(map(float, match.groups())) for _, match in stack.lines(pattern))


def _mean_copy(copies: Sequence[Sequence[float]]) -> str:
    """Returns a text with the mean numbers of blocks and milliseconds of copies, each given as (blocks, ms, ...)."""
    if not copies:
        return "none"
    return f"{fmean(c[0] for c in copies):.1f} blocks in {fmean(c[1] for c in copies):.2f} ms"


def _judge_rest(report: Report, stack: Stack) -> None:
    """Checks that no blocks are held after the last request."""
    try:
        assert_nothing_held(stack.addresses.block_store)
    except AssertionError as error:
        report.rows.append(Row("held after the end", str(error).replace("\n", " ")[:100], "nothing", good=False))
