"""A command on a slow machine: its share of a core, its pauses, and what is left afterwards."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from testing.slow import ROOT

REPOSITORY = Path(__file__).parents[2]
BUSY = "import time; n = 0; ends = time.monotonic() + 2\nwhile time.monotonic() < ends: n += 1\n"


def usable() -> bool:
    return all(os.access(ROOT / controller / "cgroup.procs", os.W_OK) for controller in ("cpu", "freezer"))


@pytest.mark.skipif(not usable(), reason="no cgroups of version 1 for this user")
def test_a_command_is_slowed_and_paused_and_keeps_its_status() -> None:
    code = BUSY + "print(time.process_time()); raise SystemExit(3)"
    flags = ["--cpus", "0.2", "--every", "0.5", "--pauses", "0.1", "0.2"]
    command = [sys.executable, "-m", "testing.slow", *flags, "--", sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as slow:
        output, errors = slow.communicate()
    assert slow.returncode == 3, errors
    pauses = re.fullmatch(r"testing.slow: (\d+) pauses\n", errors)
    assert pauses is not None and int(pauses[1]) > 0
    assert float(output) < 0.2 * 2.0 + 0.3, "CPU time in seconds"
    assert not list(ROOT.glob(f"*/looseleaf-slow-{slow.pid}*"))
