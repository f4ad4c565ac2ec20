"""The launcher's directories in shared memory and on disk. They are created for a launch and removed after the launch.
If a launch is killed, a later launch removes the directories.

The launcher locks its directories (flock), and its services inherit the lock of the one in shared memory. There, a free
lock proves that the launcher and its services have ended, even if other processes now have their pids.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from common.errors import StartupError

ROOT = Path("/dev/shm")
_PREFIX = "looseleaf-run-"
_LOCK = "launcher.lock"


class SharedDirectory:
    """A locked directory below `root`. `close` removes it."""

    def __init__(self, root: Path = ROOT) -> None:
        """Creates and locks the directory. Raises StartupError if there is no writable shared memory."""
        sweep(root)
        try:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
            self.lock_fd = os.open(self.path / "new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartupError(
                f"no shared memory at {root} ({error.strerror}); mount a tmpfs there or name one with --directory"
            ) from error
        fcntl.flock(self.lock_fd, fcntl.LOCK_EX)
        (self.path / "new").rename(self.path / _LOCK)  # only now, because a launch treats an unlocked file as stale

    def close(self) -> None:
        """Removes the directory. A second call does nothing."""
        if self.lock_fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self.lock_fd)
            self.lock_fd = -1


def sweep(root: Path) -> int:
    """Removes the directories that killed launches of this user left below `root`. Returns their number."""
    if not root.is_dir():
        return 0
    stale = [path for path in root.glob(f"{_PREFIX}*") if is_stale(path)]
    for path in stale:
        shutil.rmtree(path, ignore_errors=True)
    return len(stale)


def is_stale(path: Path) -> bool:
    """Returns whether a launch of this user left the directory behind and none of the launch's processes is alive."""
    try:
        if path.stat().st_uid != os.getuid():
            return False
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # the directory is being made or removed, or is not ours
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        return True
    finally:
        os.close(lock)
