"""The launcher's directory in shared memory: removed at the end, or swept once all processes with its lock are gone."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import StartupError
from looseleaf.serve.shm import SharedDirectory, sweep
from testing.system import wait_for

ROOT = Path(__file__).resolve().parents[2]


def test_close_removes_it_twice_is_once(tmp_path: Path) -> None:
    shared = SharedDirectory(tmp_path)
    (shared.path / "arena").write_bytes(b"x")
    shared.close()
    shared.close()
    assert list(tmp_path.iterdir()) == []


def test_sweep_leaves_a_live_launch_and_strangers_alone(tmp_path: Path) -> None:
    shared = SharedDirectory(tmp_path)
    (tmp_path / "looseleaf-run-without-lock").mkdir()
    (tmp_path / "other").mkdir()
    assert sweep(tmp_path) == 0
    assert shared.path.exists()
    shared.close()


def test_a_launch_that_begins_is_not_swept_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, swept = fcntl.flock, []

    def lock_later(descriptor: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX:
            swept.append(sweep(tmp_path))
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock_later)
    shared = SharedDirectory(tmp_path)
    assert swept == [0] and shared.path.exists()
    shared.close()


def test_a_killed_launch_is_swept_after_its_last_service(tmp_path: Path) -> None:
    """The launcher is killed while a process that inherited the lock is still running."""
    source = f"""
import os, subprocess, sys
from pathlib import Path
from looseleaf.serve.shm import SharedDirectory
shared = SharedDirectory(Path({str(tmp_path)!r}))
quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
heir = subprocess.Popen(["sleep", "60"], pass_fds=(shared.lock_fd,), **quiet)
print(heir.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=False)
    assert sweep(tmp_path) == 0 and len(list(tmp_path.iterdir())) == 1
    subprocess.run(["kill", "-9", done.stdout.strip()], check=True)
    swept = wait_for(lambda: sweep(tmp_path), bool, 60.0, "the lock outlives its last holder")
    assert swept == 1 and list(tmp_path.iterdir()) == []


def test_no_shared_memory_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"no shared memory at .*missing") as caught:
        SharedDirectory(tmp_path / "missing")
    assert "\n" not in str(caught.value)
