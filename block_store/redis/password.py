"""Reads a Redis password from a file. Every user of the machine can read a process's flags, so a URL in a flag should
not contain a password.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote

from common.errors import StartupError
from common.secret_files import read_secret


def with_password(url: str, file: Path | None) -> str:
    """Returns `url` with the password from `file`, or `url` itself if `file` is None. Raises StartupError if the file
    cannot be used, or if `url` already contains a password.
    """
    if file is None:
        return url
    scheme, _, rest = url.partition("://")
    place = re.split(r"[/?#]", rest, maxsplit=1)[0]
    user, _, hosts = place.rpartition("@")
    if ":" in user or re.search(r"[?&]password=", url):
        raise StartupError("--redis-url already contains a password, so --redis-password-file cannot be used")
    password = quote(read_secret(file, "--redis-password-file"), safe="")
    return f"{scheme}://{user}:{password}@{hosts}{rest.removeprefix(place)}"
