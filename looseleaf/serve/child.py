"""`python -m looseleaf.serve.child PARENT_PID PACKAGE [FLAGS]` runs a service, and ends it soon after its parent
process has ended.

A flag `@ready:FILE:LINE` is replaced by that line of another service's ready file. The service's imports run before it
waits for the file, so services start in parallel even if one needs another's address. Python's garbage collector is off
during the imports, because repeated visits to torch's objects would take a fifth of a worker's import time.

A thread of the child watches the parent's pid. The kernel's PR_SET_PDEATHSIG cannot replace this thread, because the
signal is sent when the *thread* that started the child ends, and `LLM` may be created in any thread.
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
    """Sends this process SIGTERM when the parent has ended, and SIGKILL after a further `_GRACE_S` seconds."""
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def later(ready_file: Path, line: int) -> str:
    """Returns a flag that `filled` replaces by one line of a ready file. Line numbers start at 0."""
    return f"{_READY}{ready_file}:{line}"


def filled(flags: Sequence[str]) -> list[str]:
    """Returns `flags`, with each flag that `later` created replaced by its line of a ready file. Waits until the files
    exist.
    """
    return [_line(flag) if flag.startswith(_READY) else flag for flag in flags]


def _line(flag: str) -> str:
    name, _, line = flag.removeprefix(_READY).rpartition(":")
    while not (file := Path(name)).exists():  # if the launch fails, the parent ends this process
        time.sleep(_READY_POLL_S)
    return file.read_text(encoding="utf-8").split()[int(line)]


def _import_for(package: str) -> None:
    """Imports everything that the service's main module imports, then unloads that module, because `main` runs it."""
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
    """Starts the thread that watches the parent, and runs the service."""
    parent, package = int(sys.argv[1]), sys.argv[2]
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the service defines what the signal means
    threading.Thread(target=_follow, args=(parent,), name="follow-parent", daemon=True).start()
    _import_for(package)
    sys.argv[1:] = filled(sys.argv[3:])
    runpy.run_module(package, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
