"""Reads a Redis password from a file. Every user of the machine can read a process's flags, so a URL in a flag should
not contain a password.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit

from common.errors import StartupError
from common.secret_files import read_secret


def with_password(url: str, file: Path | None) -> str:
    """Returns `url` with the password from `file`, or `url` itself if `file` is None. Raises StartupError if the file
    cannot be used, or if `url` already contains a password.
    """
    if file is None:
        return url
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    if ":" in user:
        raise StartupError("--redis-url already contains a password, so --redis-password-file cannot be used")
    password = quote(read_secret(file, "--redis-password-file"), safe="")
    return urlunsplit(parts._replace(netloc=f"{user}:{password}@{host}"))
