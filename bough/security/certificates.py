"""Reads certificate files, and refuses those that peers would refuse, with the setting's name."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Any

from bough.errors import ConfigError
from bough.security.private_files import read_file

CERT, KEY, AUTHORITY, CLIENT_AUTHORITY = "--tls-cert", "--tls-key", "--tls-ca", "--tls-client-ca"
Shown = dict[str, Any]  # a certificate in the form of `ssl.SSLSocket.getpeercert`
MOST_TURNS = 10  # limit of a handshake in memory, which takes half as many


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """Paths of PEM files; empty ones are not set. Certificate and key are both set or neither."""

    cert: str = ""  # a process's own, followed by intermediate authorities
    key: str = ""
    authority: str = ""  # verifies peers' certificates
    client_authority: str = ""  # verifies certificates of clients that are not processes of this deployment

    def __bool__(self) -> bool:
        return any(self.paths)

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths that are set."""
        return tuple(path for path in (self.cert, self.key, self.authority, self.client_authority) if path)


@dataclass(frozen=True, slots=True)
class Certificates:
    """Contents of the files."""

    chain: bytes = b""
    key: bytes = b""
    authority: bytes = b""
    client_authority: bytes = b""
    names: tuple[str, ...] = ()  # in the process's certificate
    expires: float = 0.0  # seconds since 1970


def read_certificates(files: CertificateFiles, *, is_server: bool) -> Certificates:
    """Read all files and check them together.

    Raises:
        ConfigError: names the setting: a file is missing or invalid, or peers would refuse the certificate for its
            validity, authority or purpose.
    """
    if bool(files.cert) != bool(files.key):
        given, other = (CERT, KEY) if files.cert else (KEY, CERT)
        raise ConfigError(f"{other}: missing; must be given if {given} is")
    authority = _read_authority(AUTHORITY, files.authority)
    clients = _read_authority(CLIENT_AUTHORITY, files.client_authority)
    if not files.cert:
        return Certificates(authority=authority.encode(), client_authority=clients.encode())
    chain, key = read_file(CERT, files.cert, is_public=True), read_file(KEY, files.key)
    shown = _shown(files, chain, authority, is_server=is_server)
    names = tuple(value for _, value in shown.get("subjectAltName", ())) or tuple(
        value for part in shown.get("subject", ()) for name, value in part if name == "commonName"
    )
    expires = ssl.cert_time_to_seconds(shown["notAfter"])
    return Certificates(chain.encode(), key.encode(), authority.encode(), clients.encode(), names, expires)


def own_context(purpose: int, files: CertificateFiles) -> ssl.SSLContext:
    """A context with the process's own certificate. Raises ConfigError if certificate and key do not match."""
    context = ssl.SSLContext(purpose)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # otherwise OpenSSL would ask for a passphrase at the terminal
        context.load_cert_chain(files.cert, files.key, password=lambda: "")
    except ssl.SSLError as exc:
        if exc.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{KEY}: {files.key} must be the key of the certificate in {files.cert}") from exc
        raise ConfigError(
            f"{CERT}: {files.cert} must be a certificate in PEM, and {KEY}: {files.key} its key without a passphrase"
        ) from exc
    except OSError as exc:
        raise ConfigError(f"{CERT}: {files.cert} must be a readable file, got: {exc.strerror}") from exc
    return context


def _read_authority(setting: str, path: str) -> str:
    if not path:
        return ""
    text = read_file(setting, path, is_public=True)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError) as exc:
        raise ConfigError(f"{setting}: {path} must be certificates of authorities in PEM") from exc
    return text


def _shown(files: CertificateFiles, chain: str, authority: str, *, is_server: bool) -> Shown:
    """The certificate as seen by a peer that trusts the authority, or this certificate itself if there is none.

    A process is a server to some peers and a client to others: with an authority, the certificate must be valid as
    both. An application is a client, and its certificate may come from another authority.
    """
    authority = authority if is_server else ""
    client, server = (own_context(purpose, files) for purpose in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER))
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    for peer, checks in ((client, is_server), (server, not is_server or authority)):
        if checks:
            peer.verify_mode = ssl.CERT_REQUIRED
            peer.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            peer.load_verify_locations(cadata=authority or chain)
    towards_server, towards_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    # By how the peer sees the certificate: as a server's or as a client's.
    sides = {
        "server": client.wrap_bio(towards_client, towards_server),
        "client": server.wrap_bio(towards_server, towards_client, server_side=True),
    }
    for _ in range(MOST_TURNS):
        for use, side in sides.items():
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as exc:
                by = f"the authority in {AUTHORITY} {files.authority}" if authority else "itself"
                raise ConfigError(
                    f"{CERT}: {files.cert} must be valid now, as a {use}'s, and by {by}, got: {exc.verify_message}"
                ) from exc
            except ssl.SSLError as exc:
                raise ConfigError(f"{CERT}: {files.cert} must be fit for TLS 1.2 or newer, got: {exc.reason}") from exc
    return next(shown for side in sides.values() if (shown := side.getpeercert()))
