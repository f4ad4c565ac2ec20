"""Pairs of network namespaces, of which one test process creates several, one after the other."""

from __future__ import annotations

import subprocess
import sys

import pytest

from testing.two_hosts import Namespace, joined_namespaces, namespaces_work

pytestmark = pytest.mark.skipif(not namespaces_work(), reason="no network namespaces here")
LISTEN = "import socket, time; socket.create_server(('0.0.0.0', 5555)); print(flush=True); time.sleep(60)"


def interfaces() -> set[str]:
    links = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True).stdout
    return {line.split("@")[0].split()[0] for line in links.splitlines()}


def test_a_pair_can_be_created_as_soon_as_the_pair_before_is_closed() -> None:
    before = interfaces()
    for _ in range(5):
        pair = joined_namespaces()
        command = [*pair[0].enter, sys.executable, "-c", LISTEN]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "\n"
            process.kill()
        for space in pair:
            space.close()
        assert interfaces() <= before


def test_a_pair_that_cannot_be_joined_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = interfaces()
    with monkeypatch.context() as patched:
        patched.setattr("testing.two_hosts._FRONT", ("10.77.0.5", "not an address"))
        with pytest.raises(subprocess.CalledProcessError):
            joined_namespaces()
    assert interfaces() <= before
    for space in (Namespace("a"), Namespace("b")):  # their names are free
        space.close()
