"""Compares a model's files with the digests in the file `SHA256SUMS` of its directory, if there is one. The command
`sha256sum * > SHA256SUMS` creates it.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable
from pathlib import Path

from common.errors import StartupError

SUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")
_LOG = logging.getLogger(__name__)


def check_digests(directory: Path, names: Iterable[str]) -> None:
    """If the directory has SHA256SUMS, checks those of the named files that exist. Raises StartupError if a file has
    been altered or is not listed, or if a line of SHA256SUMS is invalid. The message names the file or the line.
    """
    if not (directory / SUMS).exists():
        return
    listed, found = _read(directory / SUMS), [name for name in names if (directory / name).exists()]
    for name in found:
        if name not in listed:
            raise StartupError(f"{directory / name} is not listed in {SUMS}")
        with (directory / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != listed[name]:
            raise StartupError(f"{directory / name} is not the file that {SUMS} lists: its SHA-256 is {digest}")
    _LOG.info("checked against %s: %s", directory / SUMS, ", ".join(found))


def _read(path: Path) -> dict[str, str]:
    listed: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise StartupError(f"{path}, line {number}: must be a SHA-256 and a file's name")
        listed[match[2].removeprefix("./")] = match[1].lower()
    return listed
