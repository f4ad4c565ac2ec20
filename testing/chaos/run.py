"""The inputs of the scenarios, and the checks of their answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from testing.chaos.book import Case
from testing.chaos.report import Report, Row
from testing.chaos.stack import Plan, Stack
from testing.chaos.traffic import Answer, Traffic


@dataclass(frozen=True, slots=True)
class Run:
    """The inputs of one run of a scenario."""

    model: Path
    book: Sequence[Case]
    trials: int
    seed: int
    concurrency: int = 12
    """The number of concurrent requests."""

    @property
    def rng(self) -> random.Random:
        return random.Random(self.seed)

    def report(self, scenario: str) -> Report:
        return Report(scenario, self.trials, self.seed)

    def stack(self, plan: Plan | None = None) -> Stack:
        return Stack(self.model, plan or Plan())

    def traffic(self, stack: Stack, *, shared: bool = True, priorities: Sequence[int] = (0,)) -> Traffic:
        """Returns clients of the stack. If `shared` is False, requests do not share cached prefixes, so blocks are
        reallocated often.
        """
        return Traffic(
            stack.addresses.grpc,
            self.book,
            seed=self.seed,
            concurrency=self.concurrency,
            shared=shared,
            priorities=priorities,
        )


def judge(report: Report, stack: Stack, answers: Sequence[Answer], *, most_failed: float = 0.0) -> None:
    """Checks that every answer is the oracle's, that all but a share `most_failed` are complete, and that no service
    ended permanently.
    """
    failed = [answer for answer in answers if answer.error is not None]
    report.none("answers that differ from the oracle's", sum(not a.right for a in answers), len(answers), "requests")
    if most_failed:
        complete = 100.0 * (1 - len(failed) / max(1, len(answers)))
        report.at_least(f"requests complete ({len(answers):,} in all)", complete, 100.0 * (1 - most_failed), "%")
    else:
        report.none("requests that did not complete", len(failed), len(answers), "requests")
    for reason in sorted({str(answer.error) for answer in failed})[:5]:
        report.told("  of these", f"{sum(a.error == reason for a in failed)} x {reason}")
    if not report.good:
        for line, _ in stack.lines(r" ERROR |^\w*(Error|Exception)\b")[-5:]:
            report.told("  log of " + line.service, line.text[:150])
    if stack.failure is not None:
        report.rows.append(Row("a service ended permanently", stack.failure, "none", good=False))
