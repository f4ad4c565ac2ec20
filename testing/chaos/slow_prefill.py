"""A prefill worker whose steps become slow on command. Takes the flags of `python -m prefill_svc`.

The variable LOOSELEAF_CHAOS_NOTES names a directory. While it contains the file `step`, each step begins with a pause
of as many seconds as the file says.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

from common.service_main import run_service
from engine.model_runner import ModelRunner
from prefill_svc.__main__ import main
from prefill_svc.settings import PrefillSettings
from testing.two_hosts import NOTES

STEP = "step"


def install(notes: Path) -> None:
    """Makes the steps of this process obey the file in `notes`."""
    step = ModelRunner.step

    @wraps(step)
    def slow(runner: ModelRunner, batch: Any) -> Any:
        with suppress(FileNotFoundError):
            time.sleep(float((notes / STEP).read_text()))
        return step(runner, batch)

    ModelRunner.step = slow  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    install(Path(os.environ[NOTES]))
    run_service("prefill_svc", PrefillSettings, main)
