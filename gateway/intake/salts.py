"""Derives the salts of prefix hashes, which isolate tenants' blocks, and the tenants' cache quotas."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field

from common.types import CacheQuota


@dataclass(frozen=True, slots=True)
class Salts:
    """A key derivation function for cache salts (HMAC-SHA-256). The salts of two tenants differ, so tenants do not
    share salted blocks. A client's cache_salt can only narrow the sharing.
    """

    secret: bytes = field(repr=False)

    def derive(self, tenant: str, cache_salt: str | None) -> bytes:
        """Returns the salt of a request's blocks. A request with neither a tenant nor a cache_salt gets the public
        salt, which is empty.
        """
        if not tenant and cache_salt is None:
            return b""
        fields = [tenant.encode(), b"" if cache_salt is None else b"1" + cache_salt.encode()]
        message = b"".join(len(f).to_bytes(4, "little") + f for f in fields)
        return hmac.new(self.secret, message, hashlib.sha256).digest()

    def quota(self, tenant: str, percent: int | None) -> CacheQuota | None:
        """Returns the quota of the tenant's cached blocks: `percent` of an arena's blocks, or None for no limit. All of
        the tenant's requests count towards the same quota, whatever their cache_salt is.
        """
        return None if percent is None else CacheQuota(self.derive(tenant, ""), percent)
