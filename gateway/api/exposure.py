"""Loads the gateway's certificate. Warns if other machines can reach the gateway without an API key, or without TLS."""

from __future__ import annotations

import logging

from common.certificates import CertificateFiles
from common.errors import StartupError
from common.trust import is_loopback
from gateway.settings import GatewaySettings

logger = logging.getLogger("gateway")


def front_certificates(settings: GatewaySettings) -> CertificateFiles | None:
    """Returns the certificate files for clients, or None if HTTP and gRPC are unencrypted. Raises StartupError if only
    one of the two files is given, or if a file cannot be used.
    """
    if settings.ssl_certfile is None and settings.ssl_keyfile is None:
        return None
    if settings.ssl_certfile is None or settings.ssl_keyfile is None:
        raise StartupError("--ssl-certfile and --ssl-keyfile must be given together")
    files = CertificateFiles(settings.ssl_certfile, settings.ssl_keyfile)
    files.check()
    return files


def warn_of_public_bind(settings: GatewaySettings, *, has_keys: bool) -> None:
    """If other machines can reach the gateway, logs a warning for each missing protection: API keys and TLS."""
    if is_loopback(settings.host):
        return
    if not has_keys:
        logger.warning("--host %s without an API key: anyone who can reach the gateway can use it", settings.host)
    if settings.ssl_certfile is None:
        logger.warning("--host %s without --ssl-certfile: keys and prompts are not encrypted", settings.host)
