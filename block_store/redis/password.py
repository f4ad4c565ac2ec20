"""Reads a Redis password from a file. If a URL in the flags contained it, every user of the machine could read it."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit

from common.errors import StartupError
from common.secret_files import read_secret


def with_password(url: str, file: Path | None) -> str:
    """Returns `url` with the password in `file`, if one is given. Raises StartupError if the file cannot be used."""
    if file is None:
        return url
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    if ":" in user:
        raise StartupError("--redis-url already contains a password; --redis-password-file gives another one")
    password = quote(read_secret(file, "--redis-password-file"), safe="")
    return urlunsplit(parts._replace(netloc=f"{user}:{password}@{host}"))
