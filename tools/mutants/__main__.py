"""Puts small bugs into the code, one at a time, and reports the bugs that no test detects (`make mutants`).

Each mutant is tried in a scratch copy of the tree. The tests of its area run until the first test fails. The sample of
mutants depends only on the code, `--count` and `--seed`. Each run is a fork, so torch is imported only once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from tools.mutants.operators import Mutant, mutants_of  # noqa: E402
from tools.mutants.targets import TARGETS, Target  # noqa: E402

Verdict = Literal["killed", "timeout", "survived"]
_VERDICTS: dict[int | None, Verdict] = {
    None: "timeout", 0: "survived", 1: "killed", 2: "killed", 3: "killed", 4: "killed",
}  # fmt: skip
"""Verdicts by exit status of pytest. 2 to 4 mean that the tests could not run, usually because the mutant cannot be
imported; None means a timeout. A negative status, whose absolute value is the number of a signal, also counts as
"killed". Other statuses are errors.
"""
_KEPT = (
    "bench", "block_store", "common", "decode_svc", "engine", "gateway", "kernels", "loadtest", "looseleaf", "models",
    "prefill_svc", "protos", "testing", "tests", "tools", "worker", "pyproject.toml", "README.md", "docker-compose.yml",
    "docs", "Makefile",
)  # fmt: skip
"""The parts of the tree that the tests need. A package that is missing here would be imported from the real tree, by
the editable installation.
"""


@dataclass(frozen=True, slots=True)
class Trial:
    """A mutant with its verdict and the duration of its tests."""

    target: str
    mutant: Mutant
    verdict: Verdict
    seconds: float


def scratch(directory: Path) -> Path:
    """Copies the parts of the tree that the tests need to the new directory `directory`. Returns `directory`."""
    directory.mkdir()
    for name in _KEPT:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, directory / name, ignore=shutil.ignore_patterns("__pycache__", "benchmarks"))
        elif source.exists():
            shutil.copy(source, directory / name)
    return directory


def preload() -> None:
    """Imports slow third-party modules before the forks."""
    import hypothesis.stateful
    import pytest
    import redis
    import torch

    torch.set_num_threads(1)
    del hypothesis, pytest, redis


def run_tests(tree: Path, tests: tuple[str, ...], timeout_s: float) -> int | None:
    """Runs pytest in a fork. Returns its exit status (negative if a signal killed it), or None if it exceeded
    `timeout_s`.
    """
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(tree)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        sys.path[:0] = [str(tree)]
        sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
        for name in [name for name in sys.modules if name.split(".")[0] in ("tools", "tests")]:
            del sys.modules[name]
        sys.dont_write_bytecode = True
        import pytest

        status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--timeout", "60", *tests])
        os._exit(int(status))
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            _end_session(child)
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    _end_session(child)
    os.waitpid(child, 0)
    return None


def _end_session(child: int) -> None:
    """Kills the child and the other processes of its process group."""
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        return


class Bench:
    """A pool of scratch trees, one for each worker."""

    def __init__(self, directory: Path, num_workers: int) -> None:
        self._trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(num_workers):
            self._trees.put(scratch(directory / f"tree{number}"))

    def baseline(self, target: Target) -> float:
        """Runs the tests without a mutant. Returns their duration in seconds. Raises SystemExit if they fail."""
        began, tree = time.monotonic(), self._trees.get()
        status = run_tests(tree, existing(target, tree), 600)
        self._trees.put(tree)
        if status != 0:
            raise SystemExit(f"the tests of {target.name} fail without a mutant: status {status}")
        return time.monotonic() - began

    def judge(self, target: Target, mutant: Mutant, timeout_s: float) -> Trial:
        tree, began = self._trees.get(), time.monotonic()
        file = tree / mutant.path
        original = file.read_bytes()
        file.write_bytes(mutant.apply(original))
        try:
            status = run_tests(tree, existing(target, tree), timeout_s)
        finally:
            file.write_bytes(original)
            self._trees.put(tree)
        verdict: Verdict = "killed" if status is not None and status < 0 else _VERDICTS[status]
        trial = Trial(target.name, mutant, verdict, round(time.monotonic() - began, 1))
        print(f"{verdict:9}{trial.seconds:6.1f} s  {mutant.path}:{mutant.line}  {mutant.kind}", flush=True)
        return trial


def existing(target: Target, tree: Path) -> tuple[str, ...]:
    return tuple(test for test in target.tests if (tree / test).exists())


def chosen(target: Target, most: int, seed: int) -> list[Mutant]:
    """Returns up to `most` random mutants of the area."""
    files = [file for file in target.files if (ROOT / file).exists()]
    every = [mutant for file in files for mutant in mutants_of(file, (ROOT / file).read_text())]
    return sorted(
        random.Random(f"{seed} {target.name}").sample(every, min(most, len(every))), key=lambda m: (m.path, m.line)
    )


def table(trials: list[Trial]) -> str:
    """Returns two Markdown tables: the numbers of mutants by area and file, and the survivors."""
    rows = ["| area | file | tried | killed | survived |", "|---|---|---|---|---|"]
    places = sorted({(trial.target, trial.mutant.path) for trial in trials})
    for target, path in [*((name, "all") for name in dict.fromkeys(t for t, _ in places)), *places]:
        of = Counter(t.verdict for t in trials if t.target == target and path in ("all", t.mutant.path))
        tried, left = sum(of.values()), of["survived"]
        rows.append(f"| {target} | {path} | {tried} | {tried - left} ({(tried - left) / tried:.0%}) | {left} |")
    rows += ["", "| survivor | change |", "|---|---|"]
    for trial in trials:
        if trial.verdict == "survived":
            old, new = (
                " ".join(text.split()).replace("|", "\\|")[:90] for text in (trial.mutant.old, trial.mutant.new)
            )
            rows.append(f"| {trial.mutant.path}:{trial.mutant.line} | {trial.mutant.kind}: `{old}` -> `{new}` |")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--only", nargs="*", default=[t.name for t in TARGETS], help="areas")
    parser.add_argument("--count", type=int, default=60, help="mutants of each area")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/benchmarks/faults/mutants.json")
    args = parser.parse_args()
    preload()
    trials: list[Trial] = []
    with tempfile.TemporaryDirectory(prefix="ll-mutants-") as directory, ThreadPoolExecutor(args.workers) as pool:
        bench = Bench(Path(directory), args.workers)
        for target in (target for target in TARGETS if target.name in args.only):
            took = bench.baseline(target)
            print(f"{target.name}: the tests take {took:.0f} s", flush=True)
            drawn = chosen(target, args.count, args.seed)
            trials += pool.map(lambda m, t=target, s=4 * took + 30: bench.judge(t, m, s), drawn)  # type: ignore[misc]
            args.out.write_text(json.dumps([asdict(trial) for trial in trials], indent=1) + "\n")
            args.out.with_suffix(".table.md").write_text(table(trials))
    print(table(trials))


if __name__ == "__main__":
    main()
