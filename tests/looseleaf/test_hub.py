"""Models by name: the real cache of huggingface_hub, and downloads from a local server with the Hub's protocol."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type

from common.errors import StartupError
from engine.tiny import make_checkpoint
from looseleaf.serve.model_source import resolve
from testing.gguf_files import make_gguf

COMMIT = "0123456789abcdef0123456789abcdef01234567"
EXTRA = ("README.md", "original/consolidated.00.pth", "flax_model.msgpack")


class Hub(BaseHTTPRequestHandler):
    """A server with the answers of huggingface.co for the model acme/tiny only."""

    directory: Path
    asked: list[str]

    def log_message(self, *args: Any) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.asked.append(self.path)
        files = [*(path.name for path in self.directory.iterdir()), *EXTRA]
        if self.path.startswith("/api/models/acme/tiny/revision/"):
            self._answer(
                200, json.dumps({"id": "acme/tiny", "sha": COMMIT, "siblings": [{"rfilename": n} for n in files]})
            )
        elif self.path.startswith("/api/models/acme/tiny/tree/"):
            self._answer(200, json.dumps([{"type": "file", "path": n, "size": 1, "oid": COMMIT} for n in files]))
        elif self.path.startswith(f"/acme/tiny/resolve/{COMMIT}/"):
            self._answer(200, (self.directory / self.path.rpartition("/")[2]).read_bytes())
        elif self.path.startswith("/api/models/acme/gated"):
            self._answer(403, "", {"X-Error-Code": "GatedRepo"})
        else:
            self._answer(404, "", {"X-Error-Code": "RepoNotFound"})

    def _answer(self, status: int, body: str | bytes, headers: dict[str, str] | None = None) -> None:
        data = body.encode() if isinstance(body, str) else body
        etag = hashlib.sha256(data).hexdigest()
        self.send_response(status)
        given = {"Content-Length": str(len(data)), "ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, **(headers or {})}
        for name, value in given.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[type[Hub]]:
    class OneHub(Hub):
        directory = make_checkpoint(tmp_path / "model")
        asked: list[str] = []  # noqa: RUF012

    server = ThreadingHTTPServer(("127.0.0.1", 0), OneHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    OneHub.address = f"http://127.0.0.1:{server.server_port}"  # type: ignore[attr-defined]
    yield OneHub
    server.shutdown()


def resolved(name: str, home: Path, endpoint: str = "http://127.0.0.1:9") -> str:
    """Returns the directory or the error. Runs in a separate process, because huggingface_hub reads its variables at
    import."""
    code = (
        "import sys\nfrom common.errors import StartupError\nfrom looseleaf.serve.model_source import resolve\n"
        "try: print(resolve(sys.argv[1]).directory)\nexcept StartupError as error: print('refused:', error)"
    )
    env = {**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, name], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_downloaded_once_and_from_then_on_without_the_hub(hub: Any, tmp_path: Path) -> None:
    directory = Path(resolved("acme/tiny", tmp_path / "hf", hub.address))
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in directory.iterdir()}
    assert not any(extra in path for path in hub.asked for extra in EXTRA), "other formats are not fetched"
    hub.asked.clear()
    assert resolved("acme/tiny", tmp_path / "hf", hub.address) == str(directory) and not hub.asked
    assert resolved("acme/tiny", tmp_path / "hf") == str(directory), "no network is needed"


def test_what_cannot_be_fetched_says_what_to_do(hub: Any, tmp_path: Path) -> None:
    offline = resolved("acme/tiny", tmp_path / "hf")
    assert "cannot be reached" in offline and "hf download acme/tiny --local-dir tiny" in offline
    assert f"({tmp_path}/hf/hub)" in offline
    (hub.directory / "model.safetensors").rename(hub.directory / "tiny-Q8_0.gguf")
    without = resolved("acme/tiny", tmp_path / "hf", hub.address)
    assert "acme/tiny has no *.safetensors files; for a GGUF file, run `hf download acme/tiny FILE.gguf" in without
    assert "does not show it" in resolved("acme/other", tmp_path / "hf", hub.address)
    assert f"grants access on {hub.address}/acme/gated" in resolved("acme/gated", tmp_path / "hf", hub.address)


def test_a_gguf_file_gets_a_directory_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "tale.gguf"
    make_gguf(file, tmp_path / "twin", "qwen3", {})
    found = resolve(str(file)).directory
    made = (found / "config.json").stat().st_mtime_ns
    assert found.name == "tale" and (found / "tokenizer.json").is_file()
    assert resolve(str(file)).directory == found and (found / "config.json").stat().st_mtime_ns == made
    make_gguf(file, tmp_path / "twin", "qwen3", {"blk": Type.Q4_0})
    assert resolve(str(file)).directory != found, "another file under the same name"


def test_a_file_of_another_format_is_named_as_one(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(StartupError, match=r"model\.gguf cannot be read as a GGUF file"):
        resolve(str(tmp_path / "model.gguf"))
    with pytest.raises(StartupError, match="model directory nowhere/at-all does not exist"):
        resolve("./nowhere/at-all")
