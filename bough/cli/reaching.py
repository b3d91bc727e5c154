"""Where commands find an orchestrator, and how: flags that several of them have."""

from __future__ import annotations

import argparse
import os

from bough.client import Client
from bough.config.processes import AUTHORITY_VARIABLE, CERT_VARIABLE, DEFAULT_PORT, TLS_KEY_VARIABLE
from bough.security.certificates import AUTHORITY, CERT, KEY, CertificateFiles


def add_address(parser: argparse.ArgumentParser) -> None:
    """The flags that `client_from` reads."""
    default = os.environ.get("BOUGH_ADDRESS", f"127.0.0.1:{DEFAULT_PORT}")
    text = f"of the orchestrator, or of several: A,B; grpcs://HOST:PORT for TLS (BOUGH_ADDRESS; default {default})"
    parser.add_argument("--address", default=default, help=text)
    texts = {
        AUTHORITY: (AUTHORITY_VARIABLE, "PEM file of the authority of the orchestrator's certificate: TLS is spoken"),
        CERT: (CERT_VARIABLE, "PEM file of a certificate to show, where one is asked for"),
        KEY: (TLS_KEY_VARIABLE, "PEM file of its key"),
    }
    for flag, (variable, text) in texts.items():
        parser.add_argument(flag, default=os.environ.get(variable, ""), help=f"{text} ({variable})")


def client_from(arguments: argparse.Namespace, *addresses: str) -> Client:
    """A client of the orchestrators at these addresses, or at those of the flags. Raises ConfigError."""
    files = CertificateFiles(arguments.tls_cert, arguments.tls_key, arguments.tls_ca)
    return Client(*(addresses or arguments.address.split(",")), certificates=files)
