"""The tools for a GPU host, tested without a GPU: the files that they name exist, and they respect limits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.gpu import check

ROOT = Path(__file__).parents[2]


def test_stages_name_tests_that_exist() -> None:
    paths = [word for stage in check.STAGES for word in stage.tests if not word.startswith("-")]
    assert paths and all((ROOT / path).exists() for path in paths)


def test_a_stage_says_what_failed_and_what_was_skipped(tmp_path: Path) -> None:
    tests = tmp_path / "test_it.py"
    tests.write_text("import pytest\n@pytest.mark.skip(reason='no moon')\ndef test_a(): ...\ndef test_b(): assert 0\n")
    outcome = check.run(check.Stage("a = b", (str(tests),), 60), 60, tmp_path)
    assert outcome.status == "failed" and outcome.summary.startswith("1 failed, 1 skipped")
    assert any("no moon" in line for line in outcome.details) and any("test_b" in line for line in outcome.details)
    assert (tmp_path / "a-is-b.log").exists()


def test_a_stage_that_takes_too_long_is_ended_and_its_fixtures_with_it(tmp_path: Path) -> None:
    tests, mark = tmp_path / "test_it.py", tmp_path / "torn down"
    tests.write_text(
        f"import pathlib, pytest, time\n@pytest.fixture\ndef f():\n    yield\n    pathlib.Path({str(mark)!r}).touch()\n"
        "@pytest.mark.parametrize('i', range(5))\ndef test_a(f, i): time.sleep(4)\n"
    )
    outcome = check.run(check.Stage("slow", (str(tests),), 60), 10, tmp_path)
    assert outcome.status == "out of time" and mark.exists()
    assert check.run(check.Stage("late", (str(tests),), 60), 5, tmp_path).status == "no time left"


def test_no_git_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMMIT", raising=False)
    monkeypatch.setenv("PATH", "")
    assert check.commit() == "unknown"
    monkeypatch.setenv("COMMIT", "abc1234")
    assert check.commit() == "abc1234"


def test_bench_is_a_shell_script_that_stops_without_a_gpu(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "tools/gpu/bench.sh", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=200,
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 1 and not any(tmp_path.iterdir())
