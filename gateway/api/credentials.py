"""Who a client is: bearer tokens, compared in constant time. The tenant comes from the credential."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from common.errors import Unauthenticated
from gateway.api.wrong_keys import WrongKeys


class Authenticator:
    """Compares bearer tokens in constant time; the tenant comes from the credential."""

    def __init__(self, keys: Mapping[str, str], wrong_keys: WrongKeys | None = None) -> None:
        """`wrong_keys` limits how many of them an address may try."""
        self._wrong_keys = wrong_keys
        self.replace(keys)

    def replace(self, keys: Mapping[str, str]) -> None:
        """`keys`: tenants by API key (`common.api_keys`); none: nobody is asked for one."""
        self._tenants = [(key.encode(), tenant) for key, tenant in keys.items()]

    def tenant(self, authorization: str | None, address: str | None = None) -> str:
        """The tenant of an Authorization header, "" when no key is asked for. Unauthenticated for a wrong one,
        ResourceExhausted where `address` has tried too many; None: this caller was looked at already.
        """
        if not self._tenants:
            return ""
        scheme, _, token = (authorization or "").partition(" ")
        given = token.strip().encode() if scheme.lower() == "bearer" else b""
        counted = None if address is None or not given else self._wrong_keys
        if counted is not None:
            counted.check(address or "", given)
        found = [tenant for key, tenant in self._tenants if hmac.compare_digest(given, key)]  # all: in constant time
        if counted is not None:
            (counted.right(address or "", given) if found else counted.wrong(address or ""))
        if not found:
            raise Unauthenticated("authorization: a bearer token with the server's API key is required")
        return found[0]
