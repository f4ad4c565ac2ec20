"""What processes of one launch show each other: its secret. Knows no service, and not who asks (`access`)."""

from __future__ import annotations

import ipaddress
import logging
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from common.access import SECRET_HEADER
from common.errors import StartupError
from common.settings import ServerSettings

SECRET_CHARS = 16
"""The fewest of a secret."""
logger = logging.getLogger("trust")


@dataclass(frozen=True, slots=True)
class Trust:
    """What a process has to show to the others."""

    secret: str | None = field(default=None, repr=False)
    """None: there is none (by hand, on loopback)."""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """For every internal call."""
        return () if self.secret is None else ((SECRET_HEADER, self.secret),)


NO_TRUST = Trust()


@dataclass(frozen=True, slots=True)
class TrustFiles:
    """Where that lies."""

    secret_file: Path | None = None

    def read(self) -> Trust:
        """StartupError: a file cannot be used."""
        return Trust(None if self.secret_file is None else read_secret(self.secret_file))


def files_of(settings: ServerSettings) -> TrustFiles:
    return TrustFiles(None if settings.secret_file is None else settings.secret_file.resolve())


def trust_of(settings: ServerSettings) -> Trust:
    """StartupError: a file cannot be used."""
    return files_of(settings).read()


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


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach a port bound to `host`."""
    if host == "localhost" or host.startswith("unix:"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # another name
        return False
