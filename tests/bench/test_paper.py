"""`make paper`: three quick measurements, the allocator of the contiguous arms, and the page."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.paper import page
from bench.paper.__main__ import FOLDER, PaperSettings, main, run_bounded
from bench.paper.memory_arms import Buddy, Contiguous, Paged, simulate
from bench.paper.parts import PARTS, Claim, Section, load
from common.errors import StartupError
from looseleaf.serve.model_source import REPOSITORY


def test_three_quick_measurements_and_their_page(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.paper", "--quick", "--folder", str(tmp_path)]
    command += ["--only", "worked_example", "--only", "memory", "--only", "hit_rates"]
    subprocess.run(command, check=True, cwd=REPOSITORY)
    example = json.loads((tmp_path / "worked_example.json").read_text())["result"]
    assert [stage["table"] for stage in example["runs"]["one worker"]] == [[7, 1], [7, 1], [7, 1, 3]]
    arms = json.loads((tmp_path / "memory.json").read_text())["result"]["arms"]
    for row in arms.values():
        assert sum(row[use] for use in ("tokens", "reserved", "rounded", "free")) == pytest.approx(100, abs=0.3)
    shares = [arms[name]["tokens"] for name in ("Orca (Max)", "Orca (Pow2)", "Orca (Oracle)", "paged, 16")]
    assert shares == sorted(shares)
    rates = json.loads((tmp_path / "hit_rates.json").read_text())["result"]["rates"]
    assert {capacity: rate["ledger"] for capacity, rate in rates.items()} == {
        capacity: pytest.approx(rate["lru"], abs=0.2) for capacity, rate in rates.items()
    }
    text = (tmp_path / "README.md").read_text()
    assert "## Shares of KV memory" in text and "* **sharing**: it has not been run yet." in text
    assert "](memory.svg)" in text and (tmp_path / "memory.svg").exists()


def test_the_committed_page_is_what_its_results_give(tmp_path: Path) -> None:
    for name in page.stored(FOLDER):
        (tmp_path / f"{name}.json").write_bytes((FOLDER / f"{name}.json").read_bytes())
    page.write(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in FOLDER.iterdir())
    for path in tmp_path.iterdir():
        assert path.read_text() == (FOLDER / path.name).read_text(), path.name
        if path.suffix == ".svg":
            ElementTree.fromstring(path.read_text())
    assert not any(json.loads(path.read_text())["origin"]["quick"] for path in tmp_path.glob("*.json"))


def test_all_measurements_end_within_40_minutes() -> None:
    assert sum(load(name).LIMIT_S for name in PARTS) <= 40 * 60


def test_a_command_is_ended_at_its_limit() -> None:
    started = time.monotonic()
    assert not run_bounded([sys.executable, "-c", "import time; time.sleep(600)", "sleeper"], 0.5)
    assert time.monotonic() - started < 120
    assert not run_bounded([sys.executable, "-c", "raise SystemExit(3)"], 120)
    assert run_bounded([sys.executable, "-c", "pass"], 120)


def test_bad_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="--only 'memroy': must be one of worked_example"):
        main(PaperSettings(only=["memroy"], folder=tmp_path))
    with pytest.raises(StartupError, match="--quick"):
        main(PaperSettings(quick=True))
    with pytest.raises(StartupError, match="no such file"):
        main(PaperSettings(trace=tmp_path / "none.csv", folder=tmp_path))


def test_a_claim_that_does_not_hold_needs_a_reason() -> None:
    with pytest.raises(ValueError, match="no reason is given"):
        page.claims({"x": Section("X", "", [Claim("c", "s", "1", "2", False)])})
    assert "| **no**: because |" in page.claims({"x": Section("X", "", [Claim("c", "s", "1", "2", False, "because")])})


def test_buddies_never_overlap_and_merge_again() -> None:
    rng, buddy = random.Random(1), Buddy(15_700)
    held: list[tuple[int, int]] = []
    for _ in range(3000):
        if held and rng.random() < 0.5:
            buddy.free(*held.pop(rng.randrange(len(held))))
        elif (found := buddy.alloc(rng.randint(1, 2048))) is not None:
            held.append(found)
        places = sorted(held)
        assert all(a + size <= b for (a, size), (b, _) in pairwise(places))
        assert buddy.num_free == 15_700 - sum(size for _, size in held)
    for place in held:
        buddy.free(*place)
    assert [buddy.alloc(8192), buddy.alloc(4096), buddy.alloc(2048)] == [(0, 8192), (8192, 4096), (12_288, 2048)]


def test_the_arms_on_a_small_memory() -> None:
    requests = [(8, 8)] * 12
    contiguous = simulate(Contiguous("max", 64, 32), requests, warm=0.0)
    assert contiguous.running / contiguous.steps == 2, "two reservations of 32 slots"
    paged = simulate(Paged(64, 4), requests, warm=0.0)
    assert paged.running / paged.steps > 3 and paged.preempted > 0
    assert paged.allocated <= 64 * paged.steps
    with pytest.raises(RuntimeError, match="too small"):
        simulate(Contiguous("max", 16, 32), requests)
