"""The secret and the certificates that processes of the same deployment present to each other."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from common.access import SECRET_HEADER
from common.certificates import CertificateFiles, Stamp
from common.errors import StartupError
from common.secret_files import read_secret

if TYPE_CHECKING:  # so that clients, which need no settings, import quickly
    from common.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class Trust:
    """The credentials that a process presents to others."""

    secret: str | None = field(default=None, repr=False)
    """The deployment's secret, or None for services that are started by hand, on loopback, without one."""
    certificates: CertificateFiles | None = None
    """The certificate files, or None if calls are not encrypted."""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata with which internal calls present the secret."""
        return () if self.secret is None else ((SECRET_HEADER, self.secret),)

    @property
    def stamp(self) -> Stamp:
        """The modification times of the certificate files, for noticing a change. The stamp is empty without
        certificates, and while a file is missing.
        """
        try:
            return () if self.certificates is None else self.certificates.stamp
        except OSError:  # the files are being replaced
            return ()


NO_TRUST = Trust()


@dataclass(frozen=True, slots=True)
class TrustFiles:
    """The paths of the files that contain the credentials."""

    secret_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None

    def read(self) -> Trust:
        """Reads the files. Raises StartupError if a file cannot be used, or if only some of the TLS files are given."""
        return Trust(None if self.secret_file is None else read_secret(self.secret_file), self._certificates())

    def _certificates(self) -> CertificateFiles | None:
        if self.tls_cert is None and self.tls_key is None and self.tls_ca is None:
            return None
        if self.tls_cert is None or self.tls_key is None or self.tls_ca is None:
            raise StartupError("--tls-cert, --tls-key and --tls-ca must be given together")
        files = CertificateFiles(self.tls_cert, self.tls_key, self.tls_ca)
        files.check()
        return files


def files_of(settings: ServerSettings) -> TrustFiles:
    paths = (settings.secret_file, settings.tls_cert, settings.tls_key, settings.tls_ca)
    # Not `resolve`: Kubernetes replaces a Secret's files by pointing a symbolic link in the path at another directory.
    return TrustFiles(*(None if path is None else path.absolute() for path in paths))


def trust_of(settings: ServerSettings) -> Trust:
    """Reads the credentials of a process. Raises StartupError as `TrustFiles.read` does."""
    return files_of(settings).read()


def is_loopback(host: str) -> bool:
    """Returns whether `host` is "localhost", a Unix socket or a loopback address, so that other machines cannot reach
    it.
    """
    if host == "localhost" or host.startswith("unix:"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a different name
        return False
