"""The Go client that is generated from the protos: examples/stream.go is compiled and run.

Go and its libraries are Debian's packages. They are unpacked but not installed, so Go finds them through GOPATH. This
script runs in the project's own environment, which has protoc, in the directory of the packages.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tried import run, works

HERE, ROOT = Path.cwd(), Path(__file__).resolve().parents[3]
GRPC = os.environ["LOOSELEAF_GRPC"]
SOURCES = HERE / "gopath" / "src"
PROTOS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "protos" / "v1").glob("*.proto"))
ENVIRONMENT = {
    **os.environ, "GOROOT": str(next(HERE.glob("usr/lib/go-*"))), "GOPATH": str(HERE / "gopath"), "GO111MODULE": "off",
    "GOCACHE": str(HERE / "cache"), "CGO_ENABLED": "0",
}  # fmt: skip


def command(*words: str) -> str:
    """Runs a command in the repository's root. Returns its output, or raises RuntimeError with its errors."""
    done = subprocess.run(words, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-4000:])
    return done.stdout


@works("all services are generated with protoc-gen-go and protoc-gen-go-grpc, and compile")
def compile_services() -> None:
    if not SOURCES.exists():
        shutil.copytree(HERE / "usr" / "share" / "gocode" / "src", SOURCES)
    shutil.rmtree(generated := SOURCES / "looseleaf", ignore_errors=True)
    generated.mkdir()
    packages = ",".join(["paths=source_relative", *(f"M{path}=looseleaf/{Path(path).parent}" for path in PROTOS)])
    plugins = [f"--plugin={HERE / 'usr' / 'bin' / name}" for name in ("protoc-gen-go", "protoc-gen-go-grpc")]
    outputs = [f"--{kind}_out={packages}:{generated}" for kind in ("go", "go-grpc")]
    command(sys.executable, "-m", "grpc_tools.protoc", "-I.", *plugins, *outputs, *PROTOS)
    command("nice", f"{ENVIRONMENT['GOROOT']}/bin/go", "build", "-o", str(HERE / "stream"), "examples/stream.go")


@works("examples/stream.go: a streamed completion")
def stream() -> None:
    said = command(str(HERE / "stream"), "-address", GRPC)
    assert said.startswith(",") and said.endswith("\n\n32 tokens\n"), said


@works("errors: INVALID_ARGUMENT with the field")
def errors() -> None:
    try:
        said = command(str(HERE / "stream"), "-address", GRPC, "-max-tokens", "100000000")
    except RuntimeError as error:
        assert "InvalidArgument" in str(error) and "max_tokens" in str(error), error
    else:
        raise AssertionError(said)


run()
