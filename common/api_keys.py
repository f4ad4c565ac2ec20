"""Reads API keys, their tenants and the tenants' limits from a setting or a file.

A file has one line per key: `TENANT KEY`, followed by the tenant's limits in the form `name=number`:

    acme  a-key    requests_per_minute=600 tokens_per_minute=200000 best_priority=-1 cache_percent=25
    acme  another
    zoo   z-key

A tenant may have several keys. Its limits may be on any of their lines, and apply to all of its keys together. Blank
lines and lines that begin with # are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from common.errors import StartupError
from common.secret_files import warn_if_accessible

DEFAULT_TENANT = "default"
_MOST = 2**31 - 1
_RANGES = {
    "requests_per_minute": (1, _MOST), "tokens_per_minute": (1, _MOST), "best_priority": (-(2**31), _MOST),
    "cache_percent": (0, 100), "operator": (0, 1),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """The limits and rights of one tenant. Except in `operator`, None means no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Tokens of prompts and outputs."""
    best_priority: int | None = None
    """The lowest number that a request may give as its priority. Lower numbers go first."""
    cache_percent: int | None = None
    """The largest share of an arena's blocks, in percent, that stays cached for the tenant without being in use."""
    operator: int | None = None
    """1 if the tenant may also load and unload adapters; 0 or None if it may not."""


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """The set of accepted keys, with their tenants. If the set is empty, clients need no key."""

    tenants: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Tenants by key."""
    limits: Mapping[str, TenantLimits] = field(default_factory=dict)
    """Limits by tenant, for the tenants in the file."""


def read_keys(api_key: str | None, path: str | None) -> ApiKeys:
    """Returns `api_key` and the keys in the file `path`. `api_key` belongs to the tenant "default", which has no limits
    if the file does not list it. A tenant in the file may use a priority below 0 only if the file allows it. If `path`
    is given, raises StartupError if the file cannot be read or has an invalid line, or if the result would contain no
    key.
    """
    tenants = {} if api_key is None else {api_key: DEFAULT_TENANT}
    if path is None:
        return ApiKeys(tenants)
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        warn_if_accessible(Path(path), "--api-key-file")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"--api-key-file {path} cannot be read: {error}") from error
    limits: dict[str, TenantLimits] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if words and not words[0].startswith("#"):
            try:
                _read_line(words, tenants, limits)
            except ValueError as error:
                raise StartupError(f"--api-key-file {path}, line {number}: {error}") from None
    if not tenants:
        raise StartupError(f"--api-key-file {path} contains no key")
    return ApiKeys(tenants, {name: _completed(found) for name, found in limits.items()})


def _read_line(words: list[str], tenants: dict[str, str], limits: dict[str, TenantLimits]) -> None:
    """Reads one line. If the line is invalid, raises ValueError with a message that does not contain the key."""
    if len(words) < 2:
        raise ValueError("must be a tenant's name and a key")
    tenant, key, *settings = words
    if _is_limit(key):
        raise ValueError(f"word 2 is a limit; the key of {tenant} is missing")
    if key in tenants:
        raise ValueError(f"the key of {tenant} is given twice")
    tenants[key] = tenant
    limits.setdefault(tenant, TenantLimits())
    for place, setting in enumerate(settings, 3):
        name, value = _limit(setting, place)
        if getattr(limits[tenant], name) not in (None, value):
            raise ValueError(f"{name} of {tenant} is given twice, with different values")
        limits[tenant] = replace(limits[tenant], **{name: value})


def _is_limit(word: str) -> bool:
    return word.partition("=")[0] in (field.name for field in fields(TenantLimits)) and "=" in word


def _limit(setting: str, place: int) -> tuple[str, int]:
    """Returns the name and the value of a limit, which is word number `place` of its line. Raises ValueError if the
    limit is unknown or its value is out of range. The message does not quote an unknown limit, which may be a key.
    """
    name, _, text = setting.partition("=")
    if not _is_limit(setting):
        known = [f.name for f in fields(TenantLimits)]
        raise ValueError(
            f"word {place} is not a limit; the key may be followed by {', '.join(f'{k}=...' for k in known)}"
        )
    lowest, highest = _RANGES[name]
    if not text.removeprefix("-").isdecimal() or len(text) > 11 or not lowest <= int(text) <= highest:
        raise ValueError(f"{name} must be a whole number from {lowest} to {highest}, got {text[:40]!r}")
    return name, int(text)


def _completed(limits: TenantLimits) -> TenantLimits:
    return replace(limits, best_priority=0) if limits.best_priority is None else limits
