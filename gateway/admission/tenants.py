"""Keeps the limits of tenants: requests and tokens per minute, priority, and cached blocks. Callers pass the current
time, in seconds of a monotonic clock.

The limits come from the key file (`common.api_keys`) and may change while requests run. A tenant that the file does not
list has no limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from common.api_keys import TenantLimits

_NO_LIMITS = TenantLimits()


class Bucket:
    """A token bucket of one tenant. It contains at most the quota of one minute and fills evenly. Its level can be
    negative.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def wait_s(self, amount: float, now: float) -> float:
        """Returns the seconds until `amount` may be taken. More than the quota of one minute may be taken when the
        bucket is full.
        """
        self._fill(now)
        missing = min(amount, self.per_minute) - self._level
        return max(0.0, missing * 60.0 / self.per_minute)

    def take(self, amount: float, now: float) -> None:
        """Takes an amount. A negative amount is credited."""
        self._fill(now)
        self._level = min(self._level - amount, float(self.per_minute))

    def limit(self, per_minute: int, now: float) -> None:
        """Changes the limit. The amount taken so far does not change."""
        self._fill(now)
        self._level = min(self._level + per_minute - self.per_minute, float(per_minute))
        self.per_minute = per_minute

    def _fill(self, now: float) -> None:
        self._level = min(self._level + (now - self._at) * self.per_minute / 60.0, float(self.per_minute))
        self._at = now


@dataclass(slots=True)
class _Account:
    requests: Bucket | None = None
    tokens: Bucket | None = None


class Tenants:
    """A table of the limits and the usage of every tenant."""

    def __init__(self, limits: Mapping[str, TenantLimits], now: float) -> None:
        self._limits: Mapping[str, TenantLimits] = {}
        self._accounts: dict[str, _Account] = {}
        self.replace(limits, now)

    def replace(self, limits: Mapping[str, TenantLimits], now: float) -> None:
        """Replaces the limits. Tenants that are still in the file keep their usage."""
        self._limits = limits
        accounts = {name: self._accounts.get(name, _Account()) for name in limits}
        for name, account in accounts.items():
            account.requests = _bucket(account.requests, limits[name].requests_per_minute, now)
            account.tokens = _bucket(account.tokens, limits[name].tokens_per_minute, now)
        self._accounts = accounts

    def best_priority(self, tenant: str) -> int | None:
        """Returns the lowest priority number that the tenant may use, or None if the tenant may use any number."""
        return self._limits.get(tenant, _NO_LIMITS).best_priority

    def cache_percent(self, tenant: str) -> int | None:
        """Returns the largest share, in percent, of an arena's blocks that stays cached for the tenant, or None for no
        limit.
        """
        return self._limits.get(tenant, _NO_LIMITS).cache_percent

    def is_operator(self, tenant: str) -> bool:
        """Returns whether the tenant may load and unload adapters, and see the holders and hashes of blocks. This is
        also true of a tenant that the key file does not list.
        """
        return tenant not in self._limits or self._limits[tenant].operator == 1

    def requests(self, tenant: str) -> Bucket | None:
        """Returns the bucket of requests, or None for no limit."""
        account = self._accounts.get(tenant)
        return None if account is None else account.requests

    def tokens(self, tenant: str) -> Bucket | None:
        account = self._accounts.get(tenant)
        return None if account is None else account.tokens


def _bucket(old: Bucket | None, per_minute: int | None, now: float) -> Bucket | None:
    if per_minute is None:
        return None
    if old is None:
        return Bucket(per_minute, now)
    old.limit(per_minute, now)
    return old
