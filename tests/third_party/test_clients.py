"""Every third-party client behaves as its script in `clients/` expects (make test-third-party)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from looseleaf import LLM
from tests.third_party.conftest import STORYTELLER
from tests.third_party.install import CLIENTS, Client, NotInstalled, install
from tests.third_party.page import Row

pytestmark = [pytest.mark.third_party, pytest.mark.timeout(1500)]
SCRIPTS = Path(__file__).parent / "clients"
SCRIPT_TIMEOUT_S = 480


def run(client: Client, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs the client's script with the client's interpreter, in the client's directory."""
    script = SCRIPTS / client.script
    if client.kind == "npm":  # node searches for packages next to the script
        for name in (client.script, "tried.mjs"):
            shutil.copy(SCRIPTS / name, client.directory / name)
        script = client.directory / client.script
    environment = {**os.environ, "LOOSELEAF_MODEL_DIRECTORY": str(STORYTELLER), **variables}
    return subprocess.run(
        [client.program, str(script)], cwd=client.directory, env=environment, capture_output=True, text=True,
        timeout=SCRIPT_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_client_does_what_its_users_expect(
    client: Client, builtin: LLM, with_tools: LLM, rows: dict[str, Row], tmp_path: Path
) -> None:
    row = Row(client)
    rows[client.name] = row
    try:
        install(client)
    except NotInstalled as reason:
        row.missing = str(reason)
        pytest.skip(f"not installed: {reason}")
    variables = {
        "LOOSELEAF_URL": f"http://{builtin.addresses.http}",
        "LOOSELEAF_TOOLS_URL": f"http://{with_tools.addresses.http}",
        "LOOSELEAF_GRPC": builtin.addresses.grpc,
        "LOOSELEAF_SCRATCH": str(tmp_path),
        "LOOSELEAF_VLLM_GRPC": " ".join(builtin.addresses.vllm_grpc),
        "LOOSELEAF_TOOLS_VLLM_GRPC": " ".join(with_tools.addresses.vllm_grpc),
        "LOOSELEAF_WORKER_PID": str(builtin.pids["decode" if "decode" in builtin.pids else "worker"]),
    }
    done = run(client, variables)
    row.tried = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"what"')]
    if done.returncode != 0 or not row.tried:
        row.note("the script to its end", done.stdout[-1000:] + done.stderr[-4000:])
    assert not row.failures, "\n".join(row.failures)
