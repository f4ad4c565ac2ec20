"""Runs Hypothesis's state machines until they reach a required depth. `make model-check` runs more examples, in
shards."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping

import hypothesis
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

SHARDS = int(os.environ.get("MODEL_CHECK_SHARDS", "1"))
MOST_ROUNDS = 8


def explore(
    machine: type[RuleBasedStateMachine], seen: Counter[str], floors: Mapping[str, int], shard: int, examples: int,
    steps: int,
) -> None:  # fmt: skip
    """Runs rounds of `machine`, each with a different seed, until `seen` has reached all of `floors`. Fails if they are
    not reached after `MOST_ROUNDS`, because a machine that rarely reaches deep states finds no bugs. One round is not
    enough, because Hypothesis omits some rules from each example and uses constants of the loaded modules. For example,
    one round of the ledger's machine loses Redis 5 to 78 times.
    """
    examples = int(os.environ.get("MODEL_CHECK_EXAMPLES", examples))
    steps = int(os.environ.get("MODEL_CHECK_STEPS", steps))
    short: dict[str, tuple[int, int]] = {}
    for round_ in range(MOST_ROUNDS):
        run_state_machine_as_test(  # type: ignore[no-untyped-call]
            hypothesis.seed(shard + round_ * SHARDS)(machine),
            settings=settings(
                max_examples=max(1, examples // SHARDS), stateful_step_count=steps, deadline=None, database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )  # fmt: skip
        short = {name: (seen[name], floor) for name, floor in floors.items() if seen[name] < floor}
        if not short:
            return
    pytest.fail(f"after {MOST_ROUNDS} rounds, (done, wanted): {short}; all: {seen}")
