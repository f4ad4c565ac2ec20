"""Authenticates clients by their bearer tokens, which are compared in constant time. The token determines the
tenant.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from common.errors import Unauthenticated
from gateway.api.wrong_keys import WrongKeys


class Authenticator:
    """An authenticator of bearer tokens. It returns the tenant of a token."""

    def __init__(self, keys: Mapping[str, str], wrong_keys: WrongKeys | None = None) -> None:
        """`wrong_keys` limits how many wrong keys an address may try."""
        self._wrong_keys = wrong_keys
        self.replace(keys)

    def replace(self, keys: Mapping[str, str]) -> None:
        """Replaces the keys. `keys` maps API keys to tenants (`common.api_keys`). No key is required if `keys` is
        empty.
        """
        self._tenants = [(key.encode(), tenant) for key, tenant in keys.items()]

    @property
    def needs_key(self) -> bool:
        return bool(self._tenants)

    def tenant(self, authorization: str | None, address: str | None = None) -> str:
        """Returns the tenant of an Authorization header, or "" if no key is required.

        Raises Unauthenticated for a missing or wrong key, and ResourceExhausted if `address` has tried too many wrong
        keys and may not try this one (`WrongKeys.check`). If `address` is None, wrong keys are not counted.
        """
        if not self._tenants:
            return ""
        scheme, _, token = (authorization or "").partition(" ")
        given = token.strip().encode() if scheme.lower() == "bearer" else b""
        counted = None if address is None or not given else self._wrong_keys
        if counted is not None:
            counted.check(address or "", given)
        found = [tenant for key, tenant in self._tenants if hmac.compare_digest(given, key)]  # all keys: constant time
        if counted is not None:
            (counted.right(address or "", given) if found else counted.wrong(address or ""))
        if not found:
            raise Unauthenticated("authorization: a bearer token with the server's API key is required")
        return found[0]


class KeylessAuthenticator(Authenticator):
    """An authenticator for ports that only a trusted router reaches: callers without a key belong to one tenant."""

    def __init__(self, inner: Authenticator, tenant: str) -> None:
        self._inner = inner
        self._tenant = tenant

    def tenant(self, authorization: str | None, address: str | None = None) -> str:
        return self._tenant if authorization is None else self._inner.tenant(authorization, address)
