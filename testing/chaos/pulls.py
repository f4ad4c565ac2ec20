"""Scenarios in which a fault hits a pull. Prefill runs on host A and decode on host B, and blocks are sent slowly.

A trial sends a few requests, waits for at most `HIT_S` until blocks are under way to B (the puller holds blocks that
have not been delivered), and then causes the fault. A hit is a trial in which blocks were under way at that moment.

In the scenarios `pull-early-*`, prefill is slow as well, and the fault comes while an early pull is copying blocks of a
prompt that is still being computed.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import grpc

from looseleaf import metrics_page
from looseleaf.client import AsyncClient
from testing.chaos.book import MAX_MODEL_LEN, Case
from testing.chaos.faulty_store import FLIP, PACE
from testing.chaos.report import Report, percentile
from testing.chaos.run import Run
from testing.chaos.slow_prefill import STEP
from testing.chaos.traffic import Answer, ask
from testing.two_hosts import TwoHosts, namespaces_work

PACKAGES = {"block_store": "testing.chaos.faulty_store", "prefill_svc": "testing.chaos.slow_prefill"}
EARLY_FLAGS = {"prefill": {"max_num_batched_tokens": 32}, "gateway": {"early_pull_tokens": 16}}
"""Settings with which even the short prompts of the book are copied early."""
STEP_S = 0.15
"""The pause before each step of a slow prefill worker, which computes at most 32 tokens in a step."""
MIN_PROMPT, MIN_EARLY_PROMPT = 48, 96
WIDTH = 6
"""The number of requests in a trial."""
BYTES_PER_S = 24_000
"""The rate at which a byte channel sends blocks, in bytes per second."""
LONGEST_S = 10.0
"""The limit for the time from a request until its last message, in seconds."""
DEADLINE_S = 9.5
"""The timeout of each request, in seconds. It is shorter than LONGEST_S, because a request that times out ends with a
status, which must still reach the client.
"""
IDLE_S = 16.0
"""The time in seconds within which a host must release all blocks. It is twice the lease of a ticket."""
RETRIED = "looseleaf_requests_retried_total"
HIT_S = 60.0
"""The longest wait, in seconds, for the first blocks under way."""


@dataclass(frozen=True, slots=True)
class Trial:
    """The record of one fault and its effects."""

    answers: Sequence[Answer]
    num_under_way: int
    """The number of blocks that were under way just before the fault. 0 means that the fault hit no pull."""
    num_early: int
    """The number of early pulls among the pulls that were copying just before the fault."""
    num_lost: int
    """The number of attempts that were lost during the trial because a pull failed."""
    idle_after_s: float
    """The time in seconds from the last answer until no blocks were held, or infinity if a host took longer than
    IDLE_S.
    """


class PulledHosts(TwoHosts):
    """Two hosts whose block stores send blocks slowly inside `with paced()`."""

    rewriter: subprocess.Popen[str] | None = None

    def under_way(self) -> int:
        """Returns the number of blocks that pulls have allocated on B and not delivered yet."""
        try:
            holders = self.inspect(1).holders
        except grpc.RpcError:
            return 0
        return sum(holder.num_references for holder in holders if holder.name.startswith("pull-"))

    def num_early(self) -> int:
        """Returns the number of early pulls that are copying."""
        return round(self.metric("looseleaf_early_pulls_copying"))

    def num_lost(self) -> int:
        """Returns the number of attempts that have been lost so far because a pull failed."""
        samples = metrics_page.read(self.http)
        lost = [s for s in samples if s.name == RETRIED and s.labels.get("reason", "").startswith("pull_")]
        return round(sum(sample.value for sample in lost))

    @contextmanager
    def paced(self, step_s: float = 0.0) -> Iterator[None]:
        """Makes blocks travel slowly. If `step_s` is positive, also makes prefill's steps slow."""
        self._set_pace(BYTES_PER_S)
        try:
            with self.slow_prefill(step_s) if step_s else nullcontext():
                yield
        finally:
            (self.notes / PACE).unlink()

    @contextmanager
    def slow_prefill(self, step_s: float) -> Iterator[None]:
        (self.notes / STEP).write_text(str(step_s))
        try:
            yield
        finally:
            (self.notes / STEP).unlink()

    def _set_pace(self, bytes_per_s: int) -> None:
        note = self.notes / "next pace"
        note.write_text(str(bytes_per_s))
        note.replace(self.notes / PACE)

    def restart(self, name: str) -> None:
        """Kills a block store, and waits until its successor is ready."""
        self.processes[name].send(signal.SIGKILL)
        self.start(name)
        address = self.wait_for_store(name)
        a, b = self.block_stores
        self.block_stores = (address, b) if name == "store-a" else (a, address)

    def restart_worker(self, name: str) -> None:
        """Kills a worker, and waits until its successor is ready."""
        self.processes[name].send(signal.SIGKILL)
        self.start(name).wait_ready()

    def reboot_b(self) -> None:
        self.power_off_b()
        self.power_on_b()

    def freeze(self, seconds: float) -> None:
        self.processes["store-a"].send(signal.SIGSTOP)
        time.sleep(seconds)
        self.processes["store-a"].send(signal.SIGCONT)

    def unplug(self) -> None:
        self.cut()
        time.sleep(3.0)
        self.cut(is_up=True)

    def flip(self) -> None:
        """Tells the block stores to change one bit of a block that they send, and waits until one has done so, for at
        most HIT_S.
        """
        note = self.notes / FLIP
        note.touch()
        deadline = time.monotonic() + HIT_S
        while note.exists() and time.monotonic() < deadline:
            time.sleep(0.01)

    def rewrite(self) -> None:
        """Makes the leases of A's tickets lapse, and rewrites the blocks on A that no holder has. Sends blocks even
        more slowly during this time.
        """
        self._set_pace(BYTES_PER_S // 20)
        epochs = [str(holder.epoch) for holder in self.inspect(0).holders if holder.name == "ticket"]
        assert self.rewriter is not None
        assert self.rewriter.stdin is not None and self.rewriter.stdout is not None
        print(*epochs, file=self.rewriter.stdin, flush=True)
        self.rewriter.stdout.readline()
        self._set_pace(BYTES_PER_S)

    def start_rewriter(self) -> None:
        """Starts `testing.chaos.rewriter` on host A, unless it is running."""
        if self.rewriter is None:
            command = self.on_host(0, "testing.chaos.rewriter", str(self.directory(0)), self.redis.url)
            pipe = subprocess.PIPE
            self.rewriter = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=self.environment)
            assert self.rewriter.stdout is not None and self.rewriter.stdout.readline() == "ready\n"

    def close(self) -> None:
        if self.rewriter is not None:
            self.rewriter.communicate(timeout=30)
        super().close()


HOST_LOSS = "host-loss"
"""The fault after which host B stays off until the end of the trial."""
FAULTS: dict[str, Callable[[PulledHosts], object]] = {
    "source-kill": lambda hosts: hosts.restart("store-a"),
    "freeze-3": lambda hosts: hosts.freeze(3.0),
    "freeze-30": lambda hosts: hosts.freeze(30.0),
    "link-cut": lambda hosts: hosts.unplug(),
    "redis-flush": lambda hosts: hosts.redis.flush(),
    "lapse": lambda hosts: hosts.rewrite(),
    "flip": lambda hosts: hosts.flip(),
    "destination-kill": lambda hosts: hosts.restart("store-b"),
    "host-kill": lambda hosts: hosts.reboot_b(),
    HOST_LOSS: lambda hosts: hosts.power_off_b(),
}
EARLY_FAULTS: dict[str, Callable[[PulledHosts], object]] = {
    **FAULTS,
    "prefill-kill": lambda hosts: hosts.restart_worker("prefill-a"),
}


async def trial(
    hosts: PulledHosts, cases: Sequence[Case], fault: str, deadline_s: float = DEADLINE_S, *, early: bool = False
) -> Trial:
    """Sends the cases, and causes the fault when blocks are under way, or after HIT_S if none are. If `early` is True,
    prefill is slow, and the fault waits for an early pull. No two requests share a cached prefix.
    """
    if fault == "lapse":
        hosts.start_rewriter()
    lost = hosts.num_lost()
    with hosts.paced(STEP_S if early else 0.0):
        async with AsyncClient(hosts.grpc) as client:
            salt = f"{fault}/{time.monotonic_ns()}"
            asked = [ask(client, case, f"{salt}/{i}", timeout_s=deadline_s) for i, case in enumerate(cases)]
            running = asyncio.gather(*asked)
            num_under_way, num_early = await asyncio.to_thread(_wait_for_blocks, hosts, early)
            await asyncio.to_thread(EARLY_FAULTS[fault], hosts)
            answers = await running
    idle_after_s = await asyncio.to_thread(_idle_after_s, hosts, (0,) if fault == HOST_LOSS else (0, 1))
    if fault == HOST_LOSS:
        await asyncio.to_thread(hosts.power_on_b)
    return Trial(answers, num_under_way, num_early, hosts.num_lost() - lost, idle_after_s)


def _wait_for_blocks(hosts: PulledHosts, early: bool) -> tuple[int, int]:
    """Waits for blocks that are under way, and if `early` is True, for an early pull that copies blocks. Returns the
    number of blocks under way, and the number of early pulls.
    """
    deadline, num_early = time.monotonic() + HIT_S, 0
    while True:
        num_blocks = hosts.under_way()
        num_early = hosts.num_early() if num_blocks and early else 0
        if (num_blocks and (num_early or not early)) or time.monotonic() > deadline:
            return num_blocks, num_early
        time.sleep(0.02)


def _idle_after_s(hosts: PulledHosts, which: Sequence[int]) -> float:
    began = time.monotonic()
    try:
        hosts.assert_nothing_held(IDLE_S, which)
    except AssertionError:
        return float("inf")
    return time.monotonic() - began


def scenario(fault: str, *, early: bool = False) -> Callable[[Run], Report]:
    """Returns the scenario in which this fault hits pulls or, if `early` is True, early pulls."""

    def run_it(run: Run) -> Report:
        name = f"pull-early-{fault}" if early else f"pull-{fault}"
        report, rng, spaces = run.report(name), run.rng, namespaces_work()
        if fault == "link-cut" and not spaces:
            report.told("skipped", "no network namespaces here")
            return report
        cases = [case for case in run.book if len(case.prompt_ids) >= (MIN_EARLY_PROMPT if early else MIN_PROMPT)]
        flags = EARLY_FLAGS if early else {}
        with PulledHosts(
            run.model, namespaces=spaces, max_model_len=MAX_MODEL_LEN, packages=PACKAGES, flags=flags
        ) as hosts:
            chosen = (rng.sample(cases, WIDTH) for _ in range(run.trials))
            trials = [asyncio.run(trial(hosts, some, fault, early=early)) for some in chosen]
        tell(report, trials, early=early)
        return report

    return run_it


def tell(report: Report, trials: Sequence[Trial], *, early: bool) -> None:
    """Reports the hits and judges the answers."""
    answers = [answer for each in trials for answer in each.answers]
    failed = [answer for answer in answers if answer.error is not None]
    report.at_least("trials in which the fault hit a pull", sum(t.num_under_way > 0 for t in trials), len(trials))
    if early:
        report.at_least("trials in which it hit an early pull", sum(t.num_early > 0 for t in trials), len(trials))
    report.told("blocks under way at the fault, p50", f"{percentile([t.num_under_way for t in trials], 0.5):.0f}")
    report.told("pulls that ended with an error", f"{sum(t.num_lost for t in trials)}")
    report.none("answers that differ from the oracle's", sum(not a.right for a in answers), len(answers), "requests")
    report.told("requests that ended with a status", f"{len(failed)} of {len(answers)}")
    for reason in sorted({str(answer.error) for answer in failed})[:5]:
        report.told("  of these", f"{sum(a.error == reason for a in failed)} x {reason[:100]}")
    longest = max(answer.ended - answer.began for answer in answers)
    report.at_most("longest request", longest, LONGEST_S, "s")
    report.none("trials after which blocks stayed held", sum(t.idle_after_s > IDLE_S for t in trials), len(trials), "")
    report.told("nothing held after, most", f"{max(t.idle_after_s for t in trials):.1f} s")


SCENARIOS = {
    **{f"pull-{fault}": scenario(fault) for fault in FAULTS},
    **{f"pull-early-{fault}": scenario(fault, early=True) for fault in EARLY_FAULTS},
}
