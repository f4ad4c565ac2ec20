"""Runs the tests in rounds. A round runs each test on the targets for which it is meant, and the order of the targets
rotates from round to round.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import httpx

from bench.rounds import turned
from bench.served import peers_gap
from bench.served.peers_load import Failed, Load, Row, run_client, same_output
from bench.served.peers_report import BOTH, SPLIT
from bench.served.peers_servers import Harness, Target

GROUPS: dict[str, tuple[str, ...]] = {
    "prefill": ("prefill1", "prefill8"),
    "decode": ("decode1", "decode8", "decode32"),
    "served": ("served",),
    "prefix": ("prefix",),
    "gap": ("gap",),
}
"""The tests that share a run of the client, which takes seconds to start. `peers_gap` runs "gap" without the client."""
SPLIT_GROUPS = ("served", "prefix")
"""The groups of the client's tests that are run on the split server. The other tests load mainly one of its roles."""
GAP_PEERS = (BOTH, SPLIT, "vllm")
STREAMS = 16


@dataclass(slots=True)
class Rounds:
    """A series of rounds, with their measurements and failures."""

    harness: Harness
    load: Load
    deadline: float
    """A time on the monotonic clock. After the first round, no round begins that would probably end later."""
    prompt_len: int = 4095
    """The length of the interrupting prompt, in tokens. The models' limit is 4,096 tokens, one of which is the
    answer.
    """
    rows: list[Row] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    def run(self, targets: Sequence[Target], count: int, groups: Sequence[str] = tuple(GROUPS)) -> int:
        """Runs at least one and at most `count` rounds. Returns the number of rounds that were run."""
        longest = 0.0
        for number in range(count):
            started = time.monotonic()
            if number and started + longest > self.deadline:
                print(f"no time for round {number + 1} of {count}", flush=True)
                return number
            self._round(turned(targets, number), number, groups)
            longest = max(longest, time.monotonic() - started)
        return count

    def _round(self, targets: Sequence[Target], number: int, groups: Sequence[str]) -> None:
        for group in groups:
            for target in targets:
                if group == "gap" and target.name in GAP_PEERS:
                    self._gap(target, number)
                elif group != "gap" and (target.name != SPLIT or group in SPLIT_GROUPS):
                    self._load(target, GROUPS[group], number)

    def _load(self, target: Target, group: tuple[str, ...], number: int) -> None:
        key = f"{target.name} {self.harness.size} {','.join(group)}"
        if key in self.failures:
            return
        try:
            with target.awake():
                rows = run_client(self.harness, target, group, seed=_seed(group, number), load=self.load)
        except Failed as error:
            return self._failed(key, str(error))
        for row in rows:
            self.add({**row, "round": number})

    def _gap(self, target: Target, number: int) -> None:
        key = f"{target.name} {self.harness.size} gap"
        if key in self.failures:
            return
        try:
            with target.awake():
                found = peers_gap.measure(target.url, STREAMS, self.prompt_len, seed=number)
        except (RuntimeError, httpx.HTTPError) as error:
            return self._failed(key, str(error) or type(error).__name__)
        model = self.harness.model.name
        self.add({"peer": target.name, "model": model, "test": "gap", "round": number, **asdict(found)})

    def quality(self, target: Target) -> dict[str, int] | None:
        """Compares greedy output with that of transformers in float32. Returns None if the comparison fails."""
        try:
            with target.awake():
                return same_output(self.harness, target.url)
        except Failed as error:
            self._failed(f"{target.name} {self.harness.model.name} check_same", str(error))
            return None

    def add(self, row: Row) -> None:
        self.rows.append(row)
        names = ("tok_s", "out_tok_s", "ttft_p99", "usual_ms", "worst_ms", "other_cores", "clean_reps")
        shown = " ".join(f"{name} {row[name]}" for name in names if row.get(name) is not None)
        print(f"{time.strftime('%H:%M:%S')} {row['model']:12} {row['test']:9} {row['peer']:20} {shown}", flush=True)

    def _failed(self, key: str, why: str) -> None:
        self.failures[key] = why
        print(f"{time.strftime('%H:%M:%S')} {key}: FAILED, not tried again: {why}", flush=True)


def _seed(group: tuple[str, ...], number: int) -> int:
    """Returns the seed of one run of the client. Each group and round has a different seed, because two runs with the
    same seed would use the same prompts, even for different tests.
    """
    return 1000 * (1 + list(GROUPS.values()).index(group)) + number
