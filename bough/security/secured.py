"""Connections of applications and commands to orchestrators, with or without TLS."""

from __future__ import annotations

import argparse
import os

from bough.config.parsers import MAX_PORT
from bough.config.processes import AUTHORITY_VARIABLE, CERT_VARIABLE, TLS_KEY_VARIABLE, OrchestratorConfig
from bough.errors import ConfigError
from bough.security.certificates import AUTHORITY, CERT, KEY, CertificateFiles
from bough.security.tls import PeerChannel, Tls

SCHEME = "grpcs://"


def channels(files: CertificateFiles, *addresses: str) -> list[PeerChannel]:
    """Channels to orchestrators: all use TLS if `files` have an authority, else those whose address has the scheme.

    Raises:
        ConfigError: a file is unusable, or an address invalid.
    """
    tls = Tls(files)
    return [_channel(tls, address) for address in addresses]


def _channel(tls: Tls, address: str) -> PeerChannel:
    plain = address.removeprefix(SCHEME)
    is_url = plain.startswith(("http://", "https://"))
    if ":" not in plain or is_url or not plain.isprintable():  # without a port gRPC would ask 443
        raise ConfigError(f"addresses: must be such as 127.0.0.1:7411 or {SCHEME}127.0.0.1:7411, got {address!r}")
    port = plain.rpartition(":")[2]
    if port.isdecimal() and int(port) > MAX_PORT:  # gRPC would use the remainder modulo 65536
        raise ConfigError(f"addresses: must have a port from 1 to {MAX_PORT}, got {address!r}")
    return PeerChannel(plain, tls if tls.files.authority or plain != address else None)


def files_towards(config: OrchestratorConfig) -> CertificateFiles:
    """Files for clients of an orchestrator with these settings on its own machine."""
    authority = config.tls_ca or config.tls_cert
    if config.tls_client_ca:
        return CertificateFiles(config.tls_cert, config.tls_key, authority)
    return CertificateFiles(authority=authority)


def environment_files() -> CertificateFiles:
    """The files that the environment names."""
    names = (CERT_VARIABLE, TLS_KEY_VARIABLE, AUTHORITY_VARIABLE)
    return CertificateFiles(*(os.environ.get(name, "") for name in names))


def add_certificates(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `files_from` reads."""
    texts = {
        AUTHORITY: (AUTHORITY_VARIABLE, "PEM file of the authority of the server's certificate: TLS is spoken"),
        CERT: (CERT_VARIABLE, "PEM file of a certificate to show, where one is asked for"),
        KEY: (TLS_KEY_VARIABLE, "PEM file of its key"),
    }
    for flag, (variable, text) in texts.items():
        parser.add_argument(flag, metavar="FILE", default=os.environ.get(variable, ""), help=f"{text} ({variable})")


def files_from(arguments: argparse.Namespace) -> CertificateFiles:
    """The files that the flags name."""
    return CertificateFiles(arguments.tls_cert, arguments.tls_key, arguments.tls_ca)
