"""Runs `guidellm run` for some seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tried import MODEL, URL, run, works

SCRATCH = Path(os.environ["LOOSELEAF_SCRATCH"])
TOKENIZER = os.environ["LOOSELEAF_MODEL_DIRECTORY"]
REQUESTS = 16


@works(f"benchmark: {REQUESTS} chats of synthetic text, two streams, without errors")
def benchmark() -> None:
    command = [
        str(Path(sys.executable).parent / "guidellm"), "run",
        "--backend", f"kind=openai_http,target={URL},model={MODEL}",
        "--profile", "kind=concurrent,streams=2",
        "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}",
        "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
        "--output", f"kind=json,path={SCRATCH / 'guidellm.json'}",
        "--disable-console",
    ]  # fmt: skip
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    [made] = json.loads((SCRATCH / "guidellm.json").read_text())["benchmarks"]
    totals = made["metrics"]["request_totals"]
    assert totals["successful"] == REQUESTS and totals["errored"] == 0, totals


run()
