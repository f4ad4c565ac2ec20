"""Certificates of services, from PEM files that are read again when they change. Does not depend on services.

For internal calls, client and server both present a certificate of the same CA with the name `INSIDE_NAME`, because the
addresses of workers change. In calls of clients, only the gateway presents one.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grpc

from common.errors import StartupError
from common.secret_files import warn_if_readable

INSIDE_NAME = "looseleaf.internal"
Stamp = tuple[int, ...]
logger = logging.getLogger("certificates")


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """The files of a server's or a service's certificate."""

    cert: Path
    """PEM, with the chain."""
    key: Path
    ca: Path | None = None
    """The CAs that must have issued a peer's certificate. If it is None, a client need not present one."""

    def check(self) -> None:
        """Raises StartupError if the files cannot be used. Warns if other users can read the key."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.cert, self.key)
            if self.ca is not None:
                context.load_verify_locations(self.ca)
        except (OSError, ssl.SSLError) as error:
            raise StartupError(f"certificate {self.cert}, key {self.key}, CA {self.ca}: {error}") from error
        warn_if_readable(self.key, "the private key")

    @property
    def stamp(self) -> Stamp:
        """Returns a stamp that changes when a file changes. Raises OSError if a file is missing."""
        return tuple(path.stat().st_mtime_ns for path in (self.cert, self.key, self.ca) if path is not None)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Returns server credentials that present the current certificate to each new connection."""
        return grpc.dynamic_ssl_server_credentials(
            self._server_configuration(),
            cast(Callable[[], grpc.ServerCertificateConfiguration], _Fetch(self)),  # None: no change, as documented
            require_client_authentication=self.ca is not None,
        )

    def _server_configuration(self) -> grpc.ServerCertificateConfiguration:
        ca = None if self.ca is None else self.ca.read_bytes()
        return grpc.ssl_server_certificate_configuration([(self.key.read_bytes(), self.cert.read_bytes())], ca)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Returns channel credentials from the files as they are now."""
        ca = None if self.ca is None else self.ca.read_bytes()
        return grpc.ssl_channel_credentials(ca, self.key.read_bytes(), self.cert.read_bytes())


def front_credentials(ca: str | Path) -> grpc.ChannelCredentials:
    """Returns credentials for a gateway over TLS whose certificate was issued by a CA in this PEM file. Raises
    StartupError if the file cannot be read.
    """
    try:
        return grpc.ssl_channel_credentials(Path(ca).read_bytes())
    except OSError as error:
        raise StartupError(f"--tls-ca {ca} cannot be read: {error.strerror}") from error


class _Fetch:
    """The callback that gRPC calls at each handshake. It returns a new configuration, or None if nothing changed."""

    def __init__(self, files: CertificateFiles) -> None:
        self._files = files
        self._changed = Changed(files)

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        return self._files._server_configuration() if self._changed() else None


class Changed:
    """A callable that returns whether the files have changed since the last call and can be used."""

    def __init__(self, files: CertificateFiles) -> None:
        self._files = files
        self._seen = files.stamp
        self._refused: Stamp | None = None

    def __call__(self) -> bool:
        try:
            stamp = self._files.stamp
        except OSError as error:
            self._refuse((), error)
            return False
        if stamp in (self._seen, self._refused):
            return False
        try:
            self._files.check()
        except StartupError as error:  # only some of them have been written
            self._refuse(stamp, error)
            return False
        logger.info("new certificates are in use: %s", self._files.cert)
        self._seen = stamp
        return True

    def _refuse(self, stamp: Stamp, error: Exception) -> None:
        if stamp != self._refused:
            logger.error("certificates have changed but cannot be used; the previous ones stay: %s", error)
        self._refused = stamp


def front_context_watch(files: CertificateFiles, context: ssl.SSLContext) -> Callable[[], None]:
    """Returns a function to call from time to time, which loads changed files into a context that serves HTTP."""
    changed = Changed(files)

    def look() -> None:
        if changed():
            context.load_cert_chain(files.cert, files.key)

    return look
