"""Flags of several commands for the orchestrator's address and certificates, and a client made from them."""

from __future__ import annotations

import argparse
import os

from bough.client import Client
from bough.config.processes import DEFAULT_PORT
from bough.errors import BoughError, NoAnswer
from bough.security.tls import add_certificates, files_from

MISSING = "is it running? `bough up` starts everything; --address or BOUGH_ADDRESS sets its address"


def add_address(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `client_from` reads."""
    local = f"127.0.0.1:{DEFAULT_PORT}"
    text = f"HOST:PORT of the orchestrator, or of several: A,B; grpcs://HOST:PORT for TLS (BOUGH_ADDRESS, or {local})"
    parser.add_argument("--address", default=os.environ.get("BOUGH_ADDRESS", local), help=text)
    add_certificates(parser)


def with_hint(error: BoughError) -> str:
    """The text of an error from a call to an orchestrator, with advice if no orchestrator answers."""
    return f"{error}; {MISSING}" if isinstance(error, NoAnswer) else str(error)


def client_from(arguments: argparse.Namespace, *addresses: str) -> Client:
    """A client of the orchestrators at `addresses`, or else at --address. Raises ConfigError."""
    return Client(*(addresses or arguments.address.split(",")), certificates=files_from(arguments))
