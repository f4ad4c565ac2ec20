"""Asks a real system for answers that match random JSON schemas (`python -m testing.schemas --schemas 2000`).

By default, runs the same requests in three arms: undisturbed, while decode workers are killed in the middle of answers,
and with so few blocks that groups are swapped out. Every answer must parse and validate, or end at `max_tokens` as the
beginning of a match, or be a refusal that names the field. Each arm must give the same tokens as the first arm. In the
second arm, an answer must span a kill; in the third, a group must be swapped out and resumed. The exit status is 1 if a
check fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLTokenizer

from common.grammar import load_tokenizer
from looseleaf.serve.model_source import BUILT_IN
from testing.chaos.report import Report
from testing.chaos.stack import Stack
from testing.schemas.answers import Answer, wrong
from testing.schemas.arms import ARMS, Arm, Result, run
from testing.schemas.random_schemas import random_schemas


def tokenizer() -> LLTokenizer:
    """Returns the built-in model's tokenizer for grammars."""
    return load_tokenizer(BUILT_IN, 0)


def judge(report: Report, arm: Arm, result: Result, undisturbed: Sequence[Answer]) -> None:
    """Adds the findings on one arm to the report. `undisturbed` contains the answers of the first arm."""
    count, grammars = len(result.answers), tokenizer()
    faults = [fault for answer in result.answers if (fault := wrong(answer, grammars))]
    differ = sum(
        (one.outcome, one.token_ids) != (other.outcome, other.token_ids)
        for one, other in zip(result.answers, undisturbed, strict=True)
    )
    outcomes = Counter(answer.outcome for answer in result.answers)
    report.told("complete, parsed and validated (finish_reason stop)", str(outcomes["stop"]))
    report.told("ended at max_tokens, as a beginning (finish_reason length)", str(outcomes["length"]))
    report.told("refused, with the name of the field", str(outcomes["refused"]))
    report.none("invalid answers, or failed requests", len(faults), count, "requests")
    report.none("answers whose tokens differ from the first arm's", differ, count, "requests")
    if arm.kills:
        report.told("decode workers killed", str(len(result.kills)))
        report.at_least("answers that span a kill", result.num_spanning, 1)
    if arm.plan.preemption == "swap":
        report.at_least("groups swapped out", result.num_swaps, 1)
        report.at_least("groups resumed", result.num_resumed, 1)
    for fault in faults[:5]:
        report.told("  fault", fault)


def run_arms(names: Sequence[str], schemas: Sequence[Mapping[str, Any]], seed: int) -> list[Report]:
    """Runs the arms, prints their tables and returns them."""
    reports: list[Report] = []
    undisturbed: Sequence[Answer] = ()
    for name in names:
        began, arm = time.monotonic(), ARMS[name]
        with Stack(BUILT_IN, arm.plan) as stack:
            result = run(arm, stack, schemas)
        undisturbed = undisturbed or result.answers
        reports.append(report := Report(name, len(schemas), seed))
        judge(report, arm, result, undisturbed)
        report.seconds = time.monotonic() - began
        print(report.text(), flush=True)
    return reports


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m testing.schemas", description=__doc__)
    parser.add_argument("--schemas", type=int, default=2000, help="number of schemas")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--seed", type=int, default=20, help="seed of the schemas")
    args = parser.parse_args()
    reports = run_arms(args.arms, random_schemas(args.schemas, args.seed), args.seed)
    sys.exit(not all(report.good for report in reports))


if __name__ == "__main__":
    main()
