"""Repeats measurements from the literature on this machine, and writes the page docs/paper/README.md (`make paper`).

Each measurement runs in its own process, which is ended at the measurement's time limit. The sum of all limits is at
most 40 minutes. A result replaces NAME.json in the folder, with date, commit and machine. The page is generated from
all stored results, so `--only NAME` updates one section. The exit status is 1 if a measurement failed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from bench.paper import page
from bench.paper.parts import PARTS, chosen, load
from bench.served import machine
from bench.served.peers_servers import end
from common.errors import StartupError
from common.settings import Settings, settings_config
from looseleaf.serve.model_source import REPOSITORY

FOLDER = REPOSITORY / "docs" / "paper"


class PaperSettings(Settings):
    """The settings of `make paper`."""

    model_config = settings_config("LOOSELEAF_PAPER_", "bench.paper")

    only: list[str] = Field([], description=f"which of {', '.join(PARTS)}; default: all")
    quick: bool = Field(False, description="a rehearsal with few requests; needs --folder")
    trace: Path | None = Field(None, description="lengths for `memory`: a CSV trace in Azure's format; default: drawn")
    folder: Path = Field(FOLDER, description="where results, plots and page are written")
    page_only: bool = Field(False, description="measure nothing; generate the page from the stored results")


def main(settings: PaperSettings) -> int:
    names = [] if settings.page_only else chosen(settings.only)
    if settings.quick and settings.folder == FOLDER:
        raise StartupError("--quick: its results are not for docs/paper; name another folder with --folder")
    if settings.trace is not None and not settings.trace.is_file():
        raise StartupError(f"--trace {settings.trace}: no such file")
    settings.folder.mkdir(parents=True, exist_ok=True)
    failed = [name for name in names if not run_part(name, settings)]
    page.write(settings.folder)
    print(f"wrote {settings.folder / 'README.md'}")
    if failed:
        print(f"failed: {', '.join(failed)}; their sections show earlier results, if any", file=sys.stderr)
    return int(bool(failed))


def run_part(name: str, settings: PaperSettings) -> bool:
    """Makes a measurement and stores its result. Returns False if it fails or exceeds its limit."""
    origin, limit_s, started = machine.provenance(), load(name).LIMIT_S, time.monotonic()
    print(f"== {name}, at most {limit_s} s", flush=True)
    with tempfile.TemporaryDirectory(prefix="looseleaf-paper-") as directory:
        file = Path(directory) / "result.json"
        command = [sys.executable, "-m", "bench.paper.one", name, str(file)]
        command += ["--quick"] * settings.quick
        command += [] if settings.trace is None else ["--trace", str(settings.trace)]
        if not run_bounded(command, limit_s):
            return False
        seconds = round(time.monotonic() - started, 1)
        page.store(settings.folder, name, file, {**origin, "quick": settings.quick, "seconds": seconds})
    print(f"== {name}: {seconds} s", flush=True)
    return True


def run_bounded(command: Sequence[str], limit_s: float) -> bool:
    """Runs a command in a process group, and ends the group afterwards. Returns whether the command ended with status 0
    within `limit_s` seconds.
    """
    process = subprocess.Popen(command, cwd=REPOSITORY, start_new_session=True)
    try:
        return process.wait(limit_s) == 0
    except subprocess.TimeoutExpired:
        print(f"{command[3]}: not done after {limit_s:.0f} s", file=sys.stderr)
        return False
    finally:
        end(process)


if __name__ == "__main__":
    try:
        sys.exit(main(PaperSettings.load(sys.argv[1:])))
    except StartupError as error:
        print(f"bench.paper: {error}", file=sys.stderr)
        sys.exit(1)
