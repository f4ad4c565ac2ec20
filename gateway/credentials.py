"""Who a client is: bearer tokens, compared in constant time. The tenant comes from the credential."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from common.errors import Unauthenticated


class Authenticator:
    """Compares bearer tokens in constant time; the tenant comes from the credential."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        self.replace(keys)

    def replace(self, keys: Mapping[str, str]) -> None:
        """`keys`: tenants by API key (`common.api_keys`); none: nobody is asked for one."""
        self._tenants = [(key.encode(), tenant) for key, tenant in keys.items()]

    def tenant(self, authorization: str | None) -> str:
        """The tenant of an Authorization header, "" when no key is asked for. Unauthenticated for a wrong one."""
        if not self._tenants:
            return ""
        scheme, _, token = (authorization or "").partition(" ")
        given = token.strip().encode() if scheme.lower() == "bearer" else b""
        found = [tenant for key, tenant in self._tenants if hmac.compare_digest(given, key)]  # all: in constant time
        if not found:
            raise Unauthenticated("authorization: a bearer token with the server's API key is required")
        return found[0]
