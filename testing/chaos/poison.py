"""A scenario in which a request kills each worker that computes it. At most two workers may die before the request is
refused, and other requests must not be affected.
"""

from __future__ import annotations

import time

from common.errors import Internal
from looseleaf.client import Client
from testing.chaos.faulty import DIED, Faults
from testing.chaos.report import Report
from testing.chaos.run import Run, judge
from testing.chaos.stack import Plan, Stack

TOKEN = 300
"""A token that occurs neither in the prompts of the book nor in the answers that this scenario expects."""
MOST_DEATHS = 2
WORKERS = ("prefill-0", "prefill-1")


def poison(run: Run) -> Report:
    """Sends `trials` poisonous prompts, each three times. After each prompt, waits until dead workers are replaced."""
    report = run.report("poison")
    book = [case for case in run.book if all(TOKEN not in tokens for tokens in case.expected)]
    packages = {"prefill_svc": "testing.chaos.faulty_prefill"}
    plan = Plan(packages=packages, variables=Faults(poison_token=TOKEN).variables())
    clean = Run(run.model, book, run.trials, run.seed, run.concurrency)
    with run.stack(plan) as stack:
        with clean.traffic(stack) as traffic:
            traffic.wait_for(run.concurrency, timeout_s=60)
            most_deaths, refused = 0, 0
            for trial in range(run.trials):
                began = time.monotonic()
                before = {name: (stack.pids[name], stack.holder(name).epoch) for name in WORKERS}
                refused += _send(stack, [20 + trial, 30, TOKEN])
                for name in {line.service for line, _ in stack.lines(f"{DIED}poison", since=began)}:
                    stack.wait_back(name, *before[name])
                most_deaths = max(most_deaths, len(stack.lines(f"{DIED}poison", since=began)))
            answers = traffic.stop()
        judge(report, stack, answers)
        report.none("poisonous requests not refused", 3 * run.trials - refused, 3 * run.trials, "requests")
        report.at_most("workers that one prompt killed", most_deaths, MOST_DEATHS, "workers")
    return report


def _send(stack: Stack, prompt: list[int]) -> int:
    """Sends the prompt three times. Returns the number of refusals."""
    refused = 0
    with Client(stack.addresses.grpc, timeout=60.0) as client:
        for _ in range(3):
            try:
                client.generate(prompt, max_tokens=8, temperature=0.0)
            except Internal:
                refused += 1
    return refused
