"""Is everything right on this GPU? Runs the project's tests there and says so in one table: `make gpu-check`.

    python tools/gpu/check.py [--out DIR] [--rehearse]

Every kernel un-interpreted, every attention provider that is to be had, the model against transformers, every test of
token equality in deterministic mode (engine, and through real services), CUDA graphs against eager steps, and an arena
opened over CUDA IPC. Stages have limits of their own, which add up to less than 8 minutes; one that fails does not
keep the next from running. `--rehearse` runs the same stages where there is no GPU, with what that leaves of them.
Logs and check.json go to DIR (default build/gpu). Exit status 1 if a stage failed. Nothing here has run on a GPU yet.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTEST = (sys.executable, "-m", "pytest", "-q", "--timeout", "120", "-p", "no:cacheprovider")


@dataclass(frozen=True, slots=True)
class Stage:
    """One command and the seconds it may take."""

    name: str
    command: tuple[str, ...]
    limit_s: int


@dataclass(frozen=True, slots=True)
class Outcome:
    name: str
    status: str  # "passed", "failed" or "out of time"
    seconds: float
    summary: str  # the last line of the output


STAGES = (
    Stage("kernels", (*PYTEST, "tests/kernels/gpu", "tests/kernels/providers"), 120),
    Stage("model = transformers", (*PYTEST, "tests/engine/test_models.py"), 90),
    Stage("bits", (*PYTEST, *(f"tests/engine/test_{name}.py" for name in ("bits", "graphs", "runner"))), 90),
    Stage("arena over CUDA IPC", (*PYTEST, "tests/block_store/test_gpu_arena.py"), 30),
    Stage("tokens through services", (*PYTEST, "tests/e2e/test_tokens.py", "tests/e2e/test_prefix.py"), 80),
    Stage("workers killed", (*PYTEST, "tests/e2e/test_recovery.py"), 60),
)  # fmt: skip


def run(stage: Stage, out: Path) -> Outcome:
    """Run one stage, its output into a log of its own."""
    log = out / f"{stage.name.replace(' ', '-').replace('=', 'is')}.log"
    environment = os.environ | {"LOOSELEAF_SERVE_DETERMINISTIC": "true"}
    started = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(stage.command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=environment)
        try:
            status = "passed" if process.wait(stage.limit_s) == 0 else "failed"
        except subprocess.TimeoutExpired:
            process.terminate()  # pytest's own fixtures end the services
            process.wait()
            status = "out of time"
    lines = log.read_text(errors="replace").strip().splitlines() or [""]
    return Outcome(stage.name, status, round(time.monotonic() - started, 1), lines[-1].strip("= "))


def machine() -> dict[str, str]:
    """What this ran on."""
    import torch
    import triton

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0],
        "commit": commit.stdout.strip() or "unknown", "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--rehearse", action="store_true", help="go on without a GPU")
    options = parser.parse_args()
    about = machine()
    print(" ".join(f"{name}={value}" for name, value in about.items()), flush=True)
    if about["device"] == "none" and not options.rehearse:
        sys.exit("gpu-check: no GPU here (--rehearse goes through the stages without one)")
    options.out.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for stage in STAGES:
        outcomes.append(run(stage, options.out))
        print("{name:24} {status:12} {seconds:6.1f} s  {summary}".format(**asdict(outcomes[-1])), flush=True)
    (options.out / "check.json").write_text(json.dumps({**about, "stages": [asdict(o) for o in outcomes]}, indent=1))
    sys.exit(any(outcome.status != "passed" for outcome in outcomes))


if __name__ == "__main__":
    main()
