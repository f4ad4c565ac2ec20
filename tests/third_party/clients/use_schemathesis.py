"""`schemathesis run` on /openapi.json, with a time limit and all checks.

`schemathesis_hooks` names the refusals that no schema can express.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

from tried import URL, run, works

TIME_S = 60
SCRATCH = Path(os.environ["LOOSELEAF_SCRATCH"])
HOOKS = Path(__file__).with_name("schemathesis_hooks.py")


def schemathesis(description: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        str(Path(sys.executable).parent / "schemathesis"), "run", description, "--url", URL, "--max-examples", "10",
        "--seed", "1", "--no-shrink", "--request-timeout", "60", "--no-color", "--warnings", "off", *options,
    ]  # fmt: skip
    variables = {"SCHEMATHESIS_HOOKS": str(HOOKS), "LOOSELEAF_REFUSALS": str(SCRATCH / "refusals")}
    return subprocess.run(
        command, cwd=SCRATCH, env={**os.environ, **variables}, capture_output=True, text=True, check=False, timeout=300
    )


@works(
    f"run for {TIME_S} s, all phases, all checks: no failure, no 5xx",
    "12 rules cannot be part of a schema (sums and comparisons of lengths, JSON inside strings, grammars that must "
    "compile, ...); a hook names them",
)
def fuzz() -> None:
    done = schemathesis(f"{URL}/openapi.json", "--max-time", str(TIME_S))
    assert done.returncode == 0, done.stdout[-6000:]
    tried = re.search(r"(\d+) generated", done.stdout)
    assert tried is not None and int(tried[1]) > 300, done.stdout[-2000:]


@works("finds a rule that is removed from the schema: a refusal that is not expected")
def hides_nothing() -> None:
    with urllib.request.urlopen(f"{URL}/openapi.json", timeout=30) as reply:
        description = json.load(reply)
    del description["components"]["schemas"]["TokenizeRequest"]["not"]  # prompt and messages cannot be combined, ...
    (SCRATCH / "openapi.json").write_text(json.dumps(description))
    options = ("--include-path", "/tokenize", "--checks", "positive_data_acceptance", "--mode", "positive")
    done = schemathesis(str(SCRATCH / "openapi.json"), *options, "--max-time", "30")
    assert done.returncode == 1 and "Schema-valid request rejected" in done.stdout, done.stdout[-6000:]


run()
