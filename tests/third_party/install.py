"""The third-party clients that the suite runs, with pinned versions, each in a separate directory.

python tests/third_party/install.py [NAME ...]    # all clients, or these

The directories are below $LOOSELEAF_CLIENTS (default: ~/.cache/looseleaf-clients), so nothing enters the project's
own environment. A directory is created once, and again if its pinned versions change. With
LOOSELEAF_CLIENTS_OFFLINE=1, nothing is installed, and only clients that are there are available.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

INSTALL_TIMEOUT_S = 900


class NotInstalled(Exception):
    """The error for a client whose package is not available on this machine. The message says why."""


@dataclass(frozen=True, slots=True)
class Client:
    """A client, where its packages come from, and the script of `clients/` that uses it."""

    name: str
    """The name of its directory and of its tests."""
    title: str
    kind: Literal["pip", "npm", "deb"]
    packages: tuple[str, ...]
    """The first package is the client itself."""
    script: str

    @property
    def directory(self) -> Path:
        return cache() / self.name

    @property
    def version(self) -> str:
        """The pinned version, or, for a Debian package, the version that was unpacked."""
        if self.kind == "deb":
            return (self.directory / "version").read_text().strip()
        return self.packages[0].rpartition("==" if self.kind == "pip" else "@")[2]

    @property
    def program(self) -> str:
        """The program that runs the script: the interpreter of the client's environment, or node."""
        return {"pip": str(self.directory / "bin" / "python"), "npm": "node", "deb": sys.executable}[self.kind]


CLIENTS = (
    Client("openai", "openai (Python)", "pip", ("openai==3.54.0",), "use_openai.py"),
    Client("openai-node", "openai (npm)", "npm", ("openai@7.57.0", "zod@4.6.7"), "use_openai.mjs"),
    Client("langchain-openai", "langchain-openai", "pip", ("langchain-openai==1.7.3",), "use_langchain.py"),
    Client(
        "llama-index", "llama-index-llms-openai-like", "pip", ("llama-index-llms-openai-like==0.8.1",),
        "use_llama_index.py",
    ),
    Client("litellm", "litellm", "pip", ("litellm==1.106.2", "mcp==2.3.0"), "use_litellm.py"),
    Client("instructor", "instructor", "pip", ("instructor==1.17.0",), "use_instructor.py"),
    Client(
        "ai-sdk", "ai, @ai-sdk/openai-compatible (npm)", "npm",
        ("ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "@ai-sdk/openai@4.0.118", "zod@4.6.7"), "use_ai_sdk.mjs",
    ),
    Client("anthropic", "anthropic (Python)", "pip", ("anthropic==2.12.0",), "use_anthropic.py"),
    Client("lm-eval", "lm-eval", "pip", ("lm-eval[api]==0.4.13", "transformers==5.23.0"), "use_lm_eval.py"),
    Client("guidellm", "guidellm", "pip", ("guidellm==0.8.1",), "use_guidellm.py"),
    Client("aiperf", "aiperf", "pip", ("aiperf==0.13.0",), "use_aiperf.py"),
    Client("schemathesis", "schemathesis", "pip", ("schemathesis==4.32.5",), "use_schemathesis.py"),
    Client("smg", "smg (P/D router, over vLLM's gRPC)", "pip", ("smg==1.13.0",), "use_smg.py"),
    Client("promtool", "promtool (Debian's prometheus)", "deb", ("prometheus",), "use_promtool.py"),
    Client("go", "grpc-go (Debian's), with a generated client", "deb", (
        "golang-google-grpc-dev", "golang-google-protobuf-dev", "golang-google-genproto-dev",
        "golang-github-golang-protobuf-1-5-dev", "golang-golang-x-net-dev", "golang-golang-x-sys-dev",
        "golang-golang-x-text-dev", "golang-1.19-go", "golang-1.19-src", "protoc-gen-go", "protoc-gen-go-grpc",
    ), "use_go.py"),
)  # fmt: skip


def cache() -> Path:
    """Returns the directory that holds the clients."""
    return Path(os.environ.get("LOOSELEAF_CLIENTS") or Path.home() / ".cache" / "looseleaf-clients")


def install(client: Client) -> None:
    """Creates the client's directory if it does not exist. Raises NotInstalled. Waits while another process, such as
    another worker of the same test run, installs a client.
    """
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _install(client)


def _install(client: Client) -> None:
    stamp, wanted = client.directory / ".installed", "\n".join(client.packages)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    if os.environ.get("LOOSELEAF_CLIENTS_OFFLINE") == "1":
        raise NotInstalled("LOOSELEAF_CLIENTS_OFFLINE is set")
    shutil.rmtree(client.directory, ignore_errors=True)
    client.directory.mkdir(parents=True)
    {"pip": _pip, "npm": _npm, "deb": _deb}[client.kind](client)
    stamp.write_text(wanted)


def _pip(client: Client) -> None:
    venv.create(client.directory, with_pip=True)
    _run([client.program, "-m", "pip", "-q", "install", *client.packages])


def _npm(client: Client) -> None:
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise NotInstalled("node or npm is missing")
    _run(["npm", "install", "--silent", "--no-fund", "--no-audit", "--prefix", str(client.directory), *client.packages])


def _deb(client: Client) -> None:
    """Unpacks Debian packages without installing them: no services, no root."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise NotInstalled("this system is not Debian")
    _run(["apt-get", "download", *client.packages], cwd=client.directory)
    for archive in client.directory.glob("*.deb"):
        _run(["dpkg-deb", "-x", str(archive), str(client.directory)])
        name, version, _ = archive.name.split("_")
        if name == client.packages[0]:
            (client.directory / "version").write_text(version)
        archive.unlink()


def _run(command: list[str], cwd: Path | None = None) -> None:
    """Runs a step of an installation. Raises NotInstalled with the last line that is not a warning."""
    try:
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise NotInstalled(f"{command[0]} took more than {INSTALL_TIMEOUT_S} s") from None
    if done.returncode != 0:
        said = [
            line for line in (done.stdout + done.stderr).splitlines() if line.strip() and "WARN" not in line.upper()
        ]
        raise NotInstalled((said or ["no reason given"])[-1].strip()[:200])


def main(names: list[str]) -> int:
    """Installs the clients with these names, or all. Returns the number of clients that are not available."""
    unknown = set(names) - {client.name for client in CLIENTS}
    if unknown:
        print(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(c.name for c in CLIENTS)}", file=sys.stderr)
        return 2
    missing = 0
    for client in CLIENTS:
        if names and client.name not in names:
            continue
        try:
            install(client)
            print(f"{client.name} {client.version}: {client.directory}", flush=True)
        except NotInstalled as reason:
            missing += 1
            print(f"{client.name}: not installed: {reason}", flush=True)
    return missing


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
