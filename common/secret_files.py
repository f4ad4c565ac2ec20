"""Secrets in files that only their user can read. Light to import."""

from __future__ import annotations

import logging
import secrets
from pathlib import Path

from common.errors import StartupError

SECRET_CHARS = 16
"""The fewest of a secret."""
logger = logging.getLogger("secrets")


def read_secret(path: Path, name: str = "--secret-file") -> str:
    """The first line of a file. Warns of a file that others can read. StartupError."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"{name} {path} cannot be read: {error}") from error
    if len(text) < SECRET_CHARS or not text.isprintable() or " " in text:
        raise StartupError(f"{name} {path} must hold one word of {SECRET_CHARS} printable characters or more")
    warn_if_readable(path, name)
    return text


def warn_if_readable(path: Path, name: str) -> None:
    """One line in the log where group or others may read what is secret."""
    if (mode := path.stat().st_mode & 0o777) & 0o077:
        logger.warning("%s %s has mode %04o: others can read it; chmod 600 it", name, path, mode)


def write_secret(path: Path) -> str:
    """A new random secret in a new file that only this user can read. FileExistsError."""
    secret = secrets.token_hex(32)
    path.touch(mode=0o600, exist_ok=False)
    path.write_text(secret + "\n", encoding="ascii")
    return secret
