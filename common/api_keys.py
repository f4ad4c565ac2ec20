"""API keys and the tenants that they belong to, from a setting or a file. Knows nothing of requests."""

from __future__ import annotations

from pathlib import Path

from common.errors import StartupError

DEFAULT_TENANT = "default"


def read_keys(api_key: str | None, path: str | None) -> dict[str, str]:
    """Tenants by key; empty: nobody is asked for one. `api_key` alone belongs to the tenant "default".

    A file has a line `TENANT KEY` for each key; a tenant may have several. Blank lines and those that begin with # do
    not count. StartupError names the file and the line.
    """
    keys = {} if api_key is None else {api_key: DEFAULT_TENANT}
    if path is None:
        return keys
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"--api-key-file {path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2:
            raise StartupError(f"--api-key-file {path}, line {number}: must be a tenant's name and a key")
        if words[1] in keys:
            raise StartupError(f"--api-key-file {path}, line {number}: the key of {words[0]} is given twice")
        keys[words[1]] = words[0]
    if not keys:
        raise StartupError(f"--api-key-file {path} holds no key")
    return keys
