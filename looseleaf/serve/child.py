"""`python -m looseleaf.serve.child PARENT_PID PACKAGE [FLAGS]` runs a service that does not outlive its parent process.

A flag `@ready:FILE:LINE` stands for that line of another service's ready file. What the service imports is imported
before the file is waited for, so that services start beside each other though one needs another's address; and with
Python's garbage collector off, which would walk what torch has made again and again, a fifth of a worker's imports.

PR_SET_PDEATHSIG would do it in the kernel, but it fires when the *thread* that started the child ends, and `LLM` may be
made in any thread. So a thread watches the parent's pid instead.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

_POLL_S = 0.5
_GRACE_S = 15.0
_READY_POLL_S = 0.02
_READY = "@ready:"


def _follow(parent: int) -> None:
    """SIGTERM to ourselves once the parent is gone, SIGKILL if that was not enough."""
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def later(ready_file: Path, line: int) -> str:
    """The flag that stands for a line of a ready file, counted from 0."""
    return f"{_READY}{ready_file}:{line}"


def filled(flags: Sequence[str]) -> list[str]:
    """`flags` with the lines that they stand for; waits until the files are there."""
    return [_line(flag) if flag.startswith(_READY) else flag for flag in flags]


def _line(flag: str) -> str:
    name, _, line = flag.removeprefix(_READY).rpartition(":")
    while not (file := Path(name)).exists():  # a parent that has given up ends us
        time.sleep(_READY_POLL_S)
    return file.read_text(encoding="utf-8").split()[int(line)]


def _import_for(package: str) -> None:
    """Import what the service's main module imports, and forget that module, which is to be run."""
    spec = importlib.util.find_spec(package)
    is_package = spec is not None and spec.submodule_search_locations is not None
    name = f"{package}.__main__" if is_package else package
    gc.disable()
    try:
        importlib.import_module(name)
    finally:
        gc.enable()
    del sys.modules[name]


def main() -> None:
    """Start the watch, then become the service."""
    parent, package = int(sys.argv[1]), sys.argv[2]
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the service says what it means
    threading.Thread(target=_follow, args=(parent,), name="follow-parent", daemon=True).start()
    _import_for(package)
    sys.argv[1:] = filled(sys.argv[3:])
    runpy.run_module(package, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
