"""`looseleaf top` on a running system with TLS and an API key."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rich.console import Console

from looseleaf import LLM
from looseleaf.cli import main
from looseleaf.commands.top import Snapshot, screen


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certs")
    assert main(["certs", str(directory)]) == 0
    return directory


@pytest.fixture(scope="module")
def llm(certs: Path) -> Iterator[LLM]:
    files = {"ssl_certfile": f"{certs}/front.pem", "ssl_keyfile": f"{certs}/front.key"}
    files |= {"tls_cert": f"{certs}/inside.pem", "tls_key": f"{certs}/inside.key", "tls_ca": f"{certs}/ca.pem"}
    with LLM(num_blocks=512, max_model_len=512, roles="both", api_key="secret", **files) as running:
        running.client.generate(list(range(50)), max_tokens=20, n=2, ignore_eos=True, request_id="twins")
        yield running


@pytest.fixture
def flags(llm: LLM, certs: Path) -> list[str]:
    return [llm.addresses.http, "--api-key", "secret", "--tls-ca", f"{certs}/ca.pem"]


def test_once_prints_requests_workers_and_blocks(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", *flags, "--once"]) == 0
    shown = capsys.readouterr().out
    assert "storyteller" in shown and "worker.prefill" in shown and "0/64" in shown and "\x1b" not in shown
    [row] = [line.split() for line in shown.splitlines() if line.startswith("twins")]
    assert row[-5] == "length" and row[-3:] == ["50", "0", "40"], "prompt, cached and output tokens"


def test_names_are_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    worker = {"worker_id": "[red]w", "role": "prefill", "draining": False, "avoided": False, "waiting_tokens": 0}
    told = {"request_id": "a[/b]", "total_ns": 1, "phases": [], "outcome": "stop"}
    loads = {"num_running": 0, "num_waiting": 0}
    now = Snapshot(0.0, "m[/b]", [worker | loads], [], [told], 0.0, 0.0)
    Console().print(screen(now, now))
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("m[/b]", "[red]w", "a[/b]"))


class Impostor(BaseHTTPRequestHandler):
    """A server that is not a gateway: `page` is its answer to every request, with `status`."""

    status, kind, page = 200, "text/html", b""

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("content-type", self.kind)
        self.end_headers()
        self.wfile.write(self.page)

    def log_message(self, *args: object) -> None:
        """Logs nothing."""


@pytest.mark.parametrize(
    "status, kind, page, says",
    [
        (200, "text/html", b"<html>", "is not a Looseleaf gateway"),
        (200, "application/json", b'{"data": []}', "is not a Looseleaf gateway"),
        (200, "application/json", b"[]", "is not a Looseleaf gateway"),
        (502, "text/html", b"<html>", "Bad Gateway"),
        (502, "application/json", b"{}", "is not a Looseleaf gateway"),
    ],
)
def test_an_answer_that_is_not_a_gateways_is_one_sentence(
    capsys: pytest.CaptureFixture[str], status: int, kind: str, page: bytes, says: str
) -> None:
    handler = type("Handler", (Impostor,), {"status": status, "kind": kind, "page": page})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert main(["top", f"127.0.0.1:{server.server_port}", "--once"]) == 1
        server.shutdown()
    told = capsys.readouterr().err
    assert says in told and told.count("\n") == 1


def test_it_refreshes_until_it_is_interrupted(llm: LLM, flags: list[str]) -> None:
    terminal, inner = pty.openpty()
    command = [sys.executable, "-m", "looseleaf", "top", *flags, "--interval", "0.2"]
    with subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner, start_new_session=True) as process:
        os.close(inner)
        shown = read_until(terminal, "output tokens/s")
        sent = threading.Thread(
            target=llm.client.generate, args=([7, 8],), kwargs={"max_tokens": 400, "request_id": "later"}
        )
        sent.start()
        shown += read_until(terminal, "later")
        sent.join()
        os.kill(llm.pids["gateway"], signal.SIGKILL)
        shown += read_until(terminal, "does not answer")
        shown += read_until(terminal, "output tokens/s")
        process.send_signal(signal.SIGINT)
        shown += read_until(terminal, "\x1b[?1049l")
        assert process.wait(60) == 130
    os.close(terminal)
    assert "\x1b[?1049h" in shown, "it drew on the alternate screen"


def read_until(terminal: int, wanted: str) -> str:
    shown = ""
    while wanted not in shown:
        shown += os.read(terminal, 65536).decode(errors="replace")
    return shown


@pytest.mark.parametrize(
    "changed, says",
    [
        ({0: "127.0.0.1:1"}, "does not answer"),
        ({2: "wrong"}, "refuses /v1/models"),
        ({4: "/nowhere/ca.pem"}, "--tls-ca /nowhere/ca.pem"),
    ],
)
def test_a_failure_is_one_sentence(
    flags: list[str], capsys: pytest.CaptureFixture[str], changed: dict[int, str], says: str
) -> None:
    assert main(["top", *(changed.get(place, flag) for place, flag in enumerate(flags)), "--once"]) == 1
    told = capsys.readouterr().err
    assert says in told and told.count("\n") == 1
