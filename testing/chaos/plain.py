"""A scenario without faults. If it fails, the results of the other scenarios are meaningless."""

from __future__ import annotations

from testing.chaos.report import Report, percentile
from testing.chaos.run import Run, judge
from testing.system import assert_nothing_held


def none(run: Run) -> Report:
    """Sends at least `trials` requests through two prefill and two decode workers."""
    report = run.report("none")
    with run.stack() as stack:
        with run.traffic(stack) as traffic:
            traffic.wait_for(run.trials, timeout_s=60 + run.trials)
            answers = traffic.stop()
        judge(report, stack, answers)
        gaps = [answer.longest_gap_s for answer in answers if answer.case.streamed]
        report.told("longest gap p99 (no beams)", f"{percentile(gaps, 0.99):.2f} s")
        attempts = stack.metric("looseleaf_request_attempts_sum") - stack.metric("looseleaf_request_attempts_count")
        report.told("attempts beyond the first", f"{attempts:.0f}")
        assert_nothing_held(stack.addresses.block_store)
    return report
