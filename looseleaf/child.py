"""`python -m looseleaf.child PARENT_PID PACKAGE [FLAGS]` runs a service that does not outlive its parent process.

PR_SET_PDEATHSIG would do it in the kernel, but it fires when the *thread* that started the child ends, and `LLM` may be
made in any thread. So a thread watches the parent's pid instead.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time

_POLL_S = 0.5
_GRACE_S = 15.0


def _follow(parent: int) -> None:
    """SIGTERM to ourselves once the parent is gone, SIGKILL if that was not enough."""
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Start the watch, then become the service."""
    parent, package = int(sys.argv[1]), sys.argv[2]
    threading.Thread(target=_follow, args=(parent,), name="follow-parent", daemon=True).start()
    sys.argv[1:] = sys.argv[3:]
    runpy.run_module(package, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
