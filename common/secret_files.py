"""Reads and writes files that contain secrets. Logs a warning when it reads a secret that other users can access."""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path

from common.errors import StartupError

SECRET_CHARS = 16
"""Minimum length of a secret."""
logger = logging.getLogger("secrets")


def read_secret(path: Path, name: str = "--secret-file") -> str:
    """Returns the secret in a file. Warns if other users can access the file. Raises StartupError if the file cannot be
    read or is not one word of at least SECRET_CHARS characters.
    """
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"{name} {path} cannot be read: {error}") from error
    if len(text) < SECRET_CHARS or not text.isprintable() or " " in text:
        raise StartupError(f"{name} {path} must hold one word of {SECRET_CHARS} printable characters or more")
    warn_if_accessible(path, name)
    return text


def warn_if_accessible(path: Path, name: str) -> None:
    """Logs a warning if a secret file's mode gives rights to users other than the owner. If root owns the file and this
    process is not root, the group may read the file, as in a Secret that Kubernetes mounts.
    """
    state = path.stat()
    forbidden = 0o037 if state.st_uid == 0 != os.geteuid() else 0o077
    if (mode := state.st_mode & 0o777) & forbidden:
        logger.warning("%s %s has mode %04o: others can access it; chmod 600 it", name, path, mode)


def lasting_secret(path: Path) -> str:
    """Returns the secret in a file. Creates the file and its directory if they do not exist. Raises StartupError if the
    file cannot be read or written, or does not contain a valid secret.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        return write_secret(path)
    except FileExistsError:
        return read_secret(path, "the secret in")
    except OSError as error:
        raise StartupError(f"{path} cannot be written: {error.strerror}") from error


def write_secret(path: Path, given: str | None = None) -> str:
    """Writes the given secret, or else a random one, to a new file with mode 600, and returns it. Raises
    FileExistsError if `path` exists.
    """
    secret = given or secrets.token_hex(32)
    path.touch(mode=0o600, exist_ok=False)
    path.write_text(secret + "\n", encoding="ascii")
    return secret
