"""Runs two nodes of a Ray cluster on one machine, each in a network namespace with a separate /dev/shm, and the command
`looseleaf` on the head node. Needs root.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from looseleaf.serve.service_flags import flags_of
from testing.two_hosts import LINK, joined_namespaces, namespaces_work

_PORT = 6379
_JOIN_S = 120.0
_COMMAND_S = 180.0
_STORE_BYTES = 80_000_000  # Ray's minimum is 75 MB


def obstacle() -> str | None:
    """Returns the reason why there can be no such nodes here, or None."""
    if importlib.util.find_spec("ray") is None:
        return "Ray is not installed: pip install 'looseleaf[ray]'"
    return None if namespaces_work() else "no network namespaces here"


class RayNodes:
    """Two running Ray nodes, A (the head) and B. `close` ends them and everything that runs on them."""

    def __init__(self, num_cpus: int) -> None:
        """Starts the nodes, with this number of CPUs each."""
        # The paths of Ray's sockets must be short.
        self._scratch = tempfile.TemporaryDirectory(prefix="llr", ignore_cleanup_errors=True)
        self.spaces = joined_namespaces()
        self._num_cpus = num_cpus
        self._nodes: list[subprocess.Popen[bytes]] = []
        try:
            for host in (0, 1):
                self.start_node(host)
        except BaseException:
            self.close()
            raise

    def start_node(self, host: int) -> None:
        """Starts the Ray processes of a node, and waits until the node has joined (0: A, 1: B)."""
        flags: dict[str, object] = {
            "node_ip_address": LINK[host], "num_cpus": self._num_cpus, "object_store_memory": _STORE_BYTES,
            "temp_dir": Path(self._scratch.name) / "ab"[host], "block": True,
        }  # fmt: skip
        flags |= {"address": self.address} if host else {"head": True, "port": _PORT, "include_dashboard": "false"}
        log = Path(self._scratch.name) / f"{'ab'[host]}.log"
        log.unlink(missing_ok=True)
        with log.open("ab") as output:
            command = [*self.spaces[host].enter, str(Path(sys.executable).with_name("ray")), "start", *flags_of(flags)]
            node = subprocess.Popen(command, stdout=output, stderr=output, env=self.environment, start_new_session=True)
        self._nodes.append(node)
        deadline = time.monotonic() + _JOIN_S
        while "will now block forever" not in log.read_text():
            assert node.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.1)

    @property
    def address(self) -> str:
        """The address of the Ray cluster."""
        return f"{LINK[0]}:{_PORT}"

    @property
    def environment(self) -> dict[str, str]:
        given = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_worker_prestart": "0", "RAY_ADDRESS": self.address}
        return {**os.environ, **given, "PYTHONPATH": str(Path(__file__).parents[1])}

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs the command `looseleaf` on node A, and returns its status and output."""
        return subprocess.run(
            self._command(words), env=self.environment, capture_output=True, text=True, timeout=_COMMAND_S, check=False
        )

    def begin(self, *words: str) -> subprocess.Popen[str]:
        """Starts the command `looseleaf` on node A, with its standard output in a pipe."""
        return subprocess.Popen(self._command(words), env=self.environment, stdout=subprocess.PIPE, text=True)

    def _command(self, words: Sequence[str]) -> list[str]:
        return [*self.spaces[0].enter, sys.executable, "-m", "looseleaf", *words]

    def looseleaf(self, *words: str) -> str:
        """Runs the command `looseleaf` on node A, and returns what it prints. Raises AssertionError if it fails."""
        done = self.run(*words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def groups(self) -> dict[str, dict[str, Any]]:
        """Returns the groups of services of the deployment, as `looseleaf status` reports them."""
        groups: dict[str, dict[str, Any]] = json.loads(self.looseleaf("status", "--json"))["groups"]
        return groups

    def pids(self, host: int) -> set[int]:
        """Returns the ids of all processes of a node."""
        return self.spaces[host].pids()

    def kill_node(self, host: int) -> None:
        """Ends every process of a node at once."""
        self.spaces[host].kill_all()

    def close(self) -> None:
        for host in (1, 0):
            self.kill_node(host)
        for node in self._nodes:
            node.wait()
        for space in self.spaces:
            space.close()
        self._scratch.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
