"""Creates certificate authorities and certificates."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from bough.security.certificates import CertificateFiles

HERE = ("localhost", "127.0.0.1")


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, in PEM."""

    certificate: bytes
    key: bytes

    def write(self, folder: Path, name: str) -> tuple[Path, Path]:
        """Write both files, replacing each atomically."""
        paths = folder / f"{name}.pem", folder / f"{name}.key"
        for path, text in zip(paths, (self.certificate, self.key), strict=True):
            draft = path.with_suffix(".new")
            draft.touch(0o600)
            draft.write_bytes(text)
            os.replace(draft, path)
        return paths


class Authority:
    """A certificate authority."""

    def __init__(self, name: str = "authority") -> None:
        self._key, self._name = ec.generate_private_key(ec.SECP256R1()), _named(name)
        builder = _builder(self._name, self._name, self._key.public_key(), timedelta(days=900))
        signed = builder.add_extension(x509.BasicConstraints(True, None), True).sign(self._key, hashes.SHA256())
        self.certificate = signed.public_bytes(Encoding.PEM)

    def pair(self, name: str, hosts: Sequence[str] = HERE, days: float = 60) -> Pair:
        """A certificate of host names and addresses, valid for the given number of days."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_named(name), self._name, key.public_key(), timedelta(days=days))
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), False)
        signed = builder.sign(self._key, hashes.SHA256())
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return Pair(signed.public_bytes(Encoding.PEM), private)

    def write(self, folder: Path, name: str = "ca") -> Path:
        path = folder / f"{name}.pem"
        path.write_bytes(self.certificate)
        return path

    def files(self, folder: Path, name: str = "process", hosts: Sequence[str] = HERE) -> CertificateFiles:
        """Write the TLS files of a process with a certificate of this authority."""
        certificate, key = self.pair(name, hosts).write(folder, name)
        return CertificateFiles(str(certificate), str(key), str(self.write(folder)))


def flags_of(files: CertificateFiles) -> list[str]:
    """Command-line flags for these TLS files."""
    flags = {"--tls-cert": files.cert, "--tls-key": files.key, "--tls-ca": files.authority}
    return [word for flag, path in flags.items() if path for word in (flag, path)]


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, lasts: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=30))
        .not_valid_after(now + lasts)
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
