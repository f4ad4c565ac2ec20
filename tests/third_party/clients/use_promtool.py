"""`promtool check metrics` on /metrics. promtool is a program, so this script runs in plain Python, in promtool's
directory."""

from __future__ import annotations

import subprocess
import urllib.request

from tried import URL, run, works


@works("check metrics", 'it rejects the colon in "vllm:...", the names that vLLM uses')
def check_metrics() -> None:
    with urllib.request.urlopen(f"{URL}/metrics", timeout=30) as reply:
        page = reply.read()
    done = subprocess.run(["usr/bin/promtool", "check", "metrics"], input=page, capture_output=True, check=False)
    said = (done.stdout + done.stderr).decode().splitlines()
    assert done.returncode in (0, 3) and len(page) > 1000, said
    ours = [line for line in said if not (line.startswith("vllm:") and line.endswith("should not contain ':'"))]
    assert not ours, ours


run()
