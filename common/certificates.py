"""Certificates of services, from PEM files that are read again when they change.

For internal calls, client and server both present a certificate that the same CA has issued for the name `INSIDE_NAME`.
The name is not an address, because the addresses of workers change. For calls from clients, only the gateway presents a
certificate.
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
from common.secret_files import warn_if_accessible

INSIDE_NAME = "looseleaf.internal"
Stamp = tuple[int, ...]
logger = logging.getLogger("certificates")


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """PEM files with a certificate, its private key and the CAs of peers."""

    cert: Path
    """The certificate and its chain."""
    key: Path
    ca: Path | None = None
    """The CAs that must have issued a peer's certificate. If this is None, a client need not present a certificate."""

    def check(self) -> None:
        """Raises StartupError if the files cannot be used. Warns if other users can read the key."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.cert, self.key)
            if self.ca is not None:
                context.load_verify_locations(self.ca)
        except (OSError, ssl.SSLError) as error:
            raise StartupError(f"certificate {self.cert}, key {self.key}, CA {self.ca}: {error}") from error
        warn_if_accessible(self.key, "the private key")

    @property
    def stamp(self) -> Stamp:
        """The modification times of the files, for noticing a change. Raises OSError if a file is missing."""
        return tuple(path.stat().st_mtime_ns for path in (self.cert, self.key, self.ca) if path is not None)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Returns server credentials that present the newest usable certificate to each new connection."""
        return grpc.dynamic_ssl_server_credentials(
            self._server_configuration(),
            cast(Callable[[], grpc.ServerCertificateConfiguration], _Fetch(self)),  # None: unchanged
            require_client_authentication=self.ca is not None,
        )

    def _server_configuration(self) -> grpc.ServerCertificateConfiguration:
        ca = None if self.ca is None else self.ca.read_bytes()
        return grpc.ssl_server_certificate_configuration([(self.key.read_bytes(), self.cert.read_bytes())], ca)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Returns channel credentials from the current files."""
        ca = None if self.ca is None else self.ca.read_bytes()
        return grpc.ssl_channel_credentials(ca, self.key.read_bytes(), self.cert.read_bytes())

    def server_context(self) -> ssl.SSLContext:
        """Returns a context for sockets of an internal server. Clients must present a certificate issued by `ca`."""
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def client_context(self) -> ssl.SSLContext:
        """Returns a context for sockets of an internal client, which must use the server name `INSIDE_NAME`."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.load_cert_chain(self.cert, self.key)
        context.verify_mode = ssl.CERT_REQUIRED
        if self.ca is not None:
            context.load_verify_locations(self.ca)
        return context


def front_credentials(ca: str | Path) -> grpc.ChannelCredentials:
    """Returns credentials for calls to a gateway whose certificate was issued by a CA in the PEM file `ca`. Raises
    StartupError if the file cannot be read.
    """
    try:
        return grpc.ssl_channel_credentials(Path(ca).read_bytes())
    except OSError as error:
        raise StartupError(f"--tls-ca {ca} cannot be read: {error.strerror}") from error


class _Fetch:
    """The callback that gRPC calls at each handshake. It returns a new configuration, or None if the files have not
    changed or cannot be used.
    """

    def __init__(self, files: CertificateFiles) -> None:
        self._files = files
        self._changed = Changed(files)

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        return self._files._server_configuration() if self._changed() else None


class Changed:
    """A callable that returns True once for each new version of the files that passes `CertificateFiles.check`."""

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
        except StartupError as error:  # perhaps only some of the files have been written
            self._refuse(stamp, error)
            return False
        logger.info("new certificates are in use: %s", self._files.cert)
        self._seen = stamp
        return True

    def _refuse(self, stamp: Stamp, error: Exception) -> None:
        if stamp != self._refused:
            logger.error("certificates have changed but cannot be used; the previous ones stay in use: %s", error)
        self._refused = stamp


def front_context_watch(files: CertificateFiles, context: ssl.SSLContext) -> Callable[[], None]:
    """Returns a function that loads the certificate and its key into an HTTP server's context if the files have
    changed. The server must call this function regularly.
    """
    changed = Changed(files)

    def look() -> None:
        if changed():
            context.load_cert_chain(files.cert, files.key)

    return look
