"""Who a client is: bearer tokens, compared in constant time. The tenant comes from the credential."""

from __future__ import annotations

import hmac

from common.errors import Unauthenticated


class Authenticator:
    """Compares bearer tokens in constant time; the tenant comes from the credential."""

    def __init__(self, api_key: str | None) -> None:
        self._key = None if api_key is None else api_key.encode()

    def tenant(self, authorization: str | None) -> str:
        """The tenant of an Authorization header, "" when no key is asked for. Unauthenticated for a wrong one."""
        if self._key is None:
            return ""
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(token.strip().encode(), self._key):
            raise Unauthenticated("authorization: a bearer token with the server's API key is required")
        return "default"
