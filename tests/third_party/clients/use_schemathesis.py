"""`schemathesis run` on /openapi.json, with a time limit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tried import URL, run, works

TIME_S = 60
LEFT_OUT = "positive_data_acceptance"
"""A check that fails for every rule that is not in our JSON schemas, such as fields that exclude each other."""


@works(
    f"run for {TIME_S} s, all phases, all checks except {LEFT_OUT}: no failure, no 5xx",
    "the schemas allow more than the server accepts: rules between fields, known types of items and parts",
)
def fuzz() -> None:
    command = [
        str(Path(sys.executable).parent / "schemathesis"), "run", f"{URL}/openapi.json", "--max-examples", "10",
        "--max-time", str(TIME_S), "--seed", "1", "--no-shrink", "--exclude-checks", LEFT_OUT,
        "--request-timeout", "60", "--no-color", "--warnings", "off",
    ]  # fmt: skip
    scratch = os.environ["LOOSELEAF_SCRATCH"]
    done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-6000:]
    tried = re.search(r"(\d+) generated", done.stdout)
    assert tried is not None and int(tried[1]) > 300, done.stdout[-2000:]


run()
