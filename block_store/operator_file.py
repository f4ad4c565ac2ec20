"""The operator file, which contains a running block store's address, Redis URL and trust files.

The file is in the store's directory and readable only by the store's user. `looseleaf blocks` and `looseleaf fsck` read
it. The Redis URL in the file contains the password, if there is one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from common.trust import TrustFiles

SHARED_MEMORY = Path("/dev/shm")
_NAME = "operator.json"


@dataclass(frozen=True, slots=True)
class OperatorFile:
    """The address, the Redis URL and the trust files of a running block store."""

    address: str
    """host:port of the store's gRPC server."""
    redis_url: str
    trust: TrustFiles


_ADAPTER = TypeAdapter(OperatorFile)


def write(directory: Path, content: OperatorFile) -> None:
    """Writes the file atomically. Only this user can read it."""
    temporary = directory / f".{_NAME}.{os.getpid()}"
    temporary.touch(mode=0o600)
    temporary.write_bytes(_ADAPTER.dump_json(content))
    temporary.rename(directory / _NAME)


def remove(directory: Path) -> None:
    (directory / _NAME).unlink(missing_ok=True)


def read(directory: Path) -> OperatorFile | None:
    """Returns the content, or None if the file is missing or invalid or this user may not read it."""
    try:
        return _ADAPTER.validate_json((directory / _NAME).read_bytes())
    except (OSError, ValidationError):
        return None


def find(address: str, root: Path = SHARED_MEMORY) -> OperatorFile | None:
    """Returns the operator file of the store whose address is `address`, or None if there is none. Searches only the
    directories of this user in `root` whose names start with `looseleaf-`.
    """
    found = (read(directory) for directory in root.glob("looseleaf-*") if _is_ours(directory))
    return next((content for content in found if content is not None and content.address == address), None)


def _is_ours(directory: Path) -> bool:
    try:
        return directory.stat().st_uid == os.getuid()
    except OSError:  # being removed
        return False
