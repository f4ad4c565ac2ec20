"""A scenario of a rolling restart under load. All services except Redis restart, one after another. No request may be
affected.

A worker or the store gets SIGTERM, ends with status 0, and is started again. A new gateway binds the same ports
(`--reuse-port`) and is ready before the old gateway gets SIGTERM.
"""

from __future__ import annotations

from collections.abc import Sequence

from testing.chaos.report import Report, percentile
from testing.chaos.run import Run, judge
from testing.chaos.stack import Plan, Stack
from testing.chaos.traffic import Answer

SERVICES = ("prefill-0", "decode-0", "block_store", "prefill-1", "decode-1", "gateway")
VARIABLES = {
    "LOOSELEAF_GATEWAY_REUSE_PORT": "true",
    "LOOSELEAF_GATEWAY_SALT_SECRET": "the same in every gateway",
    "LOOSELEAF_BLOCK_STORE_KEEP_ARENA": "true",
}


def rolling(run: Run) -> Report:
    """Restarts all services `trials` times."""
    report = run.report("rolling")
    with run.stack(Plan(variables=VARIABLES)) as stack:
        statuses: list[int] = []
        with run.traffic(stack) as traffic:
            traffic.wait_for(run.concurrency, timeout_s=60)
            for _ in range(run.trials):
                statuses += [_restart(stack, name) for name in SERVICES]
            traffic.wait_for(len(traffic.answers) + run.concurrency, timeout_s=60)
            answers = traffic.stop()
        judge(report, stack, answers)
        report.told("longest gap p50, p99", ", ".join(f"{_gap(answers, share):.2f} s" for share in (0.5, 0.99)))
        report.none("services that did not end with status 0", sum(s != 0 for s in statuses), len(statuses), "ends")
    return report


def _restart(stack: Stack, name: str) -> int:
    """Restarts a service. Waits until the new process is ready and, if it is a worker, gets requests. Returns the exit
    status of the old process.
    """
    status = stack.launcher.replace(name, overlap=name == "gateway")
    if name.startswith(("prefill", "decode")):
        stack.wait_used(name)
    return status


def _gap(answers: Sequence[Answer], share: float) -> float:
    return percentile([answer.longest_gap_s for answer in answers if answer.case.streamed], share)
