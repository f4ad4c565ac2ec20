"""Runs the project's tests on this machine's GPU, and prints the results in one table (`make gpu-check`).

    python tools/gpu/check.py [--out DIR] [--together] [--rehearse]

The stages test the compiled kernels; the engine's bits, graphs, streams and installed attention providers; an arena
opened over CUDA IPC; token equality through real services in deterministic mode, including killed workers; and the
equality of the models with transformers. The most important stages run first. Each stage has a time limit, and
`SECONDS` is the limit for all stages together. Failed and skipped tests are listed under their stage, up to
`MOST_LINES` of them. Logs and check.json go to DIR (default build/gpu). `--together` runs all stages at once, which
takes less time on a host with many cores, but the processes share the GPU. `--rehearse` runs as much as is possible
without a GPU, with longer limits. The exit status is 1 if a stage did not pass.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 540
"""The time limit for all stages together, which leaves 40 s for unpacking and building before them."""
PATIENCE = 10
"""The factor by which a rehearsal's time limits are longer, because it may run on two cores instead of sixteen cores
and a GPU.
"""
ENVIRONMENT = {
    "LOOSELEAF_SERVE_DETERMINISTIC": "true",
    "LOOSELEAF_GATEWAY_RECOVER_S": "90",  # a worker with a CUDA context and graphs takes longer to restart
    "OMP_WAIT_POLICY": "PASSIVE",
    "OMP_NUM_THREADS": "2",  # applies to each of many processes
}
TELLING = ("FAILED", "ERROR", "SKIPPED")
MOST_LINES = 20


@dataclass(frozen=True, slots=True)
class Stage:
    """A group of tests, with its time limit in seconds and its maximum number of processes (with pytest-xdist, on four
    cores or more).
    """

    name: str
    tests: tuple[str, ...]
    limit_s: int
    processes: int = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    name: str
    status: str  # "passed", "failed", "out of time" or "no time left"
    seconds: float
    summary: str  # the last line of the output
    details: tuple[str, ...] = ()


# Compilation ahead of time, rehearsals and launches on a stand-in are for machines without a GPU.
NOT_HERE = tuple(f"--ignore-glob=*/test_{name}*.py" for name in ("compile", "launch", "tune"))
STAGES = (
    Stage("kernels", ("tests/kernels/gpu", *NOT_HERE), 100, 6),
    Stage("engine", tuple(f"tests/engine/test_{name}.py" for name in ("gpu", "bits", "graphs")), 90, 6),
    Stage("arena over CUDA IPC", ("tests/block_store/test_gpu_arena.py",), 45),
    Stage("tokens through services", ("tests/e2e/test_tokens.py", "tests/e2e/test_prefix.py"), 90, 3),
    Stage("every way of decoding", ("tests/equality/test_served.py", "-kcold_cached or preempted"), 100, 3),
    Stage("workers killed", ("tests/e2e/test_recovery.py",), 100, 3),
    Stage("model = transformers", ("tests/engine/test_models.py",), 90, 4),
)


def command(stage: Stage, limit_s: float) -> list[str]:
    test_s = 0.6 * limit_s  # a test that hangs fails with its stack, and the others are still reported
    pytest = [sys.executable, "-m", "pytest", "-q", "-ra", "--timeout", f"{test_s:.0f}", "-p", "no:cacheprovider"]
    cores = len(os.sched_getaffinity(0))
    if find_spec("xdist") is not None and stage.processes > 1 and cores >= 4:
        pytest += ["-n", str(min(stage.processes, cores))]
    return [*pytest, *stage.tests]


def run(stage: Stage, limit_s: float, out: Path) -> Outcome:
    """Runs a stage, writes its output to a log, and returns its outcome. Does not start the stage if it has less than
    10 s.
    """
    if limit_s < 10:
        return Outcome(stage.name, "no time left", 0.0, "")
    log = out / f"{stage.name.replace(' ', '-').replace('=', 'is')}.log"
    environment = os.environ | ENVIRONMENT
    started = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            command(stage, limit_s),
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            status = "passed" if process.wait(limit_s) == 0 else "failed"
        except subprocess.TimeoutExpired:
            end(process)
            status = "out of time"
    lines = log.read_text(errors="replace").strip().splitlines() or [""]
    details = tuple(line[:200] for line in lines if line.startswith(TELLING))[:MOST_LINES]
    return Outcome(stage.name, status, round(time.monotonic() - started, 1), lines[-1].strip("= "), details)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a stage with SIGINT, so that fixtures can end their services. Kills the stage's process group if it has not
    ended after 15 s.
    """
    process.send_signal(signal.SIGINT)
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def commit() -> str:
    """Returns the environment variable COMMIT if it is set, and otherwise the commit of the checkout. Returns "unknown"
    if git is not installed or does not find a commit.
    """
    if "COMMIT" in os.environ:
        return os.environ["COMMIT"]
    try:
        asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return asked.stdout.strip() or "unknown"


def machine() -> dict[str, str]:
    """Returns a description of this machine."""
    import torch
    import triton

    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0],
        "commit": commit(), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--only", nargs="+", metavar="STAGE", choices=[stage.name for stage in STAGES])
    parser.add_argument("--together", action="store_true", help="run the stages at once")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="the time limit for all stages together")
    parser.add_argument("--rehearse", action="store_true", help="continue without a GPU")
    options = parser.parse_args()
    about = machine()
    print(" ".join(f"{name}={value}" for name, value in about.items()), flush=True)
    if about["device"] == "none" and not options.rehearse:
        sys.exit("gpu-check: no GPU here (--rehearse runs the stages without one)")
    options.out.mkdir(parents=True, exist_ok=True)
    patience = PATIENCE if options.rehearse else 1
    deadline = time.monotonic() + options.seconds * patience
    outcomes = []
    stages = [stage for stage in STAGES if not options.only or stage.name in options.only]
    with ThreadPoolExecutor(len(stages) if options.together else 1) as pool:

        def outcome_of(stage: Stage) -> Outcome:
            limit_s = options.seconds if options.together else stage.limit_s
            return run(stage, min(limit_s * patience, deadline - time.monotonic()), options.out)

        for ended in as_completed([pool.submit(outcome_of, stage) for stage in stages]):
            outcome = ended.result()
            outcomes.append(outcome)
            print(f"{outcome.name:24} {outcome.status:12} {outcome.seconds:6.1f} s  {outcome.summary}", flush=True)
            for line in outcome.details:
                print(f"    {line}", flush=True)
            # written after each stage, so that an interrupted session leaves its results
            report = {**about, "stages": [asdict(outcome) for outcome in outcomes]}
            (options.out / "check.json").write_text(json.dumps(report, indent=1))
    sys.exit(any(outcome.status != "passed" for outcome in outcomes))


if __name__ == "__main__":
    main()
