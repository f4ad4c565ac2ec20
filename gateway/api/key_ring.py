"""Reloads the API keys of a gateway when the gateway receives SIGHUP."""

from __future__ import annotations

import logging
import time

from common.api_keys import read_keys
from common.errors import StartupError
from gateway.admission.tenants import Tenants
from gateway.api.credentials import Authenticator

logger = logging.getLogger("keys")


class KeyRing:
    """A loader of API keys. It updates the objects that use the keys."""

    def __init__(
        self, api_key: str | None, api_key_file: str | None, authenticator: Authenticator, tenants: Tenants
    ) -> None:
        self._api_key = api_key
        self._api_key_file = api_key_file
        self._authenticator = authenticator
        self._tenants = tenants

    def reload(self) -> None:
        """Reads keys and limits from the key file. If the file cannot be read or contains an error, the old keys and
        limits stay in effect. Requests that have been admitted continue.
        """
        if self._api_key_file is None:
            logger.warning("SIGHUP: there is no --api-key-file to read again")
            return
        try:
            keys = read_keys(self._api_key, self._api_key_file)
        except StartupError as error:
            logger.error("the old keys stay in effect: %s", error)
            return
        self._authenticator.replace(keys.tenants)
        self._tenants.replace(keys.limits, time.monotonic())
        counts = len(keys.tenants), len(set(keys.tenants.values()))  # with --api-key and its tenant
        logger.info("%s was read again: %d keys of %d tenants", self._api_key_file, *counts)
