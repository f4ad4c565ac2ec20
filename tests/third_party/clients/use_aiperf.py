"""Runs `aiperf profile` for some seconds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tried import MODEL, URL, run, works

SCRATCH = Path(os.environ["LOOSELEAF_SCRATCH"])
REQUESTS = 16


@works(
    f"profile: {REQUESTS} streamed chats, four at once; also reads /metrics",
    "the path of a local tokenizer must be relative, and HF_HUB_OFFLINE must not be set",
)
def profile() -> None:
    shutil.copytree(os.environ["LOOSELEAF_MODEL_DIRECTORY"], SCRATCH / "tokenizer" / MODEL, dirs_exist_ok=True)
    command = [
        str(Path(sys.executable).parent / "aiperf"), "profile", "--model", MODEL, "--url", URL,
        "--endpoint-type", "chat", "--streaming", "--tokenizer", f"tokenizer/{MODEL}", "--concurrency", "4",
        "--request-count", str(REQUESTS), "--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "8",
        "--output-artifact-dir", str(SCRATCH / "aiperf"), "--ui", "none",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=SCRATCH, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    [report] = (SCRATCH / "aiperf").rglob("profile_export_aiperf.json")
    assert json.loads(report.read_text())["request_count"]["avg"] == REQUESTS


run()
