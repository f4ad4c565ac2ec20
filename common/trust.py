"""What processes of one launch show each other: its secret. Knows no service, and not who asks (`access`)."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from common.access import SECRET_HEADER
from common.secret_files import read_secret
from common.settings import ServerSettings


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


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach a port bound to `host`."""
    if host == "localhost" or host.startswith("unix:"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # another name
        return False
