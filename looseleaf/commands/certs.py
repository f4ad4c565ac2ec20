"""`looseleaf certs DIRECTORY`: creates a CA and certificates for trying out TLS. In production, use certificates that
your own CA has issued.
"""

from __future__ import annotations

import datetime
import ipaddress
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import Field
from pydantic_settings import CliPositionalArg

from common.certificates import INSIDE_NAME
from common.errors import StartupError
from common.settings import Settings, settings_config

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as _error:
    raise StartupError(
        "creating certificates needs the package cryptography: pip install 'looseleaf[certs]'"
    ) from _error

_LEEWAY = datetime.timedelta(minutes=5)
"""The validity of a certificate begins this long before its creation, because clocks differ."""


class CertsSettings(Settings):
    """Flags of `looseleaf certs`, which creates ca.pem; inside.pem and inside.key for --tls-cert and --tls-key; and
    front.pem and front.key for --ssl-certfile and --ssl-keyfile. The CA's own key is kept in ca.key, so that a later
    run can issue new certificates of the same CA.
    """

    model_config = settings_config("LOOSELEAF_CERTS_", "looseleaf certs")

    directory: CliPositionalArg[Path]
    host: list[str] = Field([], description="names and addresses of the gateway, in addition to those of this machine")
    days: int = Field(365, ge=1, le=3650, description="number of days for which the certificates are valid")
    missing: bool = Field(False, description="change nothing if all files exist")


def run(argv: Sequence[str]) -> int:
    settings = CertsSettings.load(argv)
    try:
        settings.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (settings.missing and all((settings.directory / name).exists() for name in _FILES)):
            make(settings.directory, settings.host, datetime.timedelta(days=settings.days))
    except (OSError, ValueError) as error:
        raise StartupError(f"{settings.directory}: {error}") from error
    print(" ".join(str(settings.directory / name) for name in _FILES))
    return 0


_FILES = ("ca.pem", "inside.pem", "inside.key", "front.pem", "front.key")


def make(directory: Path, hosts: Iterable[str], life: datetime.timedelta) -> None:
    """Issues two certificates. Creates their CA first if the directory does not contain a CA."""
    authority = _Authority(directory, life)
    authority.issue("inside", [INSIDE_NAME])
    authority.issue("front", ["localhost", "127.0.0.1", "::1", socket.gethostname(), *hosts])


class _Authority:
    """A CA whose key and certificate are files in a directory."""

    def __init__(self, directory: Path, life: datetime.timedelta) -> None:
        self._directory = directory
        self._life = life
        key_file, cert_file = directory / "ca.key", directory / "ca.pem"
        if key_file.exists() and cert_file.exists():
            key = serialization.load_pem_private_key(key_file.read_bytes(), None)
            assert isinstance(key, ec.EllipticCurvePrivateKey)
            self._key, self._cert = key, x509.load_pem_x509_certificate(cert_file.read_bytes())
            return
        self._key, name = ec.generate_private_key(ec.SECP256R1()), _name("Looseleaf test CA")
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        builder = self._builder(name, name, self._key).add_extension(x509.BasicConstraints(True, 0), critical=True)
        self._cert = builder.add_extension(usage, critical=True).sign(self._key, hashes.SHA256())
        _write(key_file, _pem(self._key))
        _write(cert_file, self._cert.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, hosts: Sequence[str]) -> None:
        """Creates NAME.pem and NAME.key. Each file atomically replaces an existing file of the same name."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(_name(hosts[0]), self._cert.subject, key)
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        names = x509.SubjectAlternativeName([_general_name(host) for host in dict.fromkeys(hosts)])
        builder = builder.add_extension(x509.BasicConstraints(False, None), critical=True)
        builder = builder.add_extension(names, critical=False)
        cert = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False).sign(self._key, hashes.SHA256())
        _write(self._directory / f"{name}.key", _pem(key))
        _write(self._directory / f"{name}.pem", cert.public_bytes(serialization.Encoding.PEM))

    def _builder(
        self, subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number())
        return builder.not_valid_before(now - _LEEWAY).not_valid_after(now + self._life)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    temporary.touch(mode=0o600)
    temporary.write_bytes(content)
    temporary.rename(path)
