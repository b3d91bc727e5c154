"""Where a process listens, and the address at which it tells others to reach it, which need not be the same."""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from bough.config.processes import ADVERTISE_AUTO, ServiceConfig
from bough.errors import ConfigError

logger = logging.getLogger(__name__)

INDEX_PORT = 6379  # where a URL names none
SocketAddress = tuple[Any, ...]  # of an IPv4 or IPv6 socket
SourceTowards = Callable[[int, SocketAddress], str]  # of an address family and an address of it


def joined(host: str, port: int) -> str:
    """An address such as 127.0.0.1:7411, or [::1]:7411 where the host is an IPv6 address."""
    host = bare(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bare(host: str) -> str:
    """A host without brackets."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def is_wildcard(host: str) -> bool:
    """Whether listening there is listening on all addresses of this machine, so that it is nowhere to connect to."""
    return bare(host) == "" or _has(host, "is_unspecified")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there; a name but localhost may be anything."""
    return bare(host) == "localhost" or _has(host, "is_loopback")


def source_towards(family: int, address: SocketAddress) -> str:
    """This machine's own address on the way to another one. Nothing is sent. Raises OSError where there is no way."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def advertised_host(config: ServiceConfig, source: SourceTowards = source_towards) -> str:
    """The host that others reach a process by; may look up the index's name, which takes its time.

    Raises:
        ConfigError: it is to be found, and there is none that other machines could reach.
    """
    chosen, host = config.advertise, config.host
    if chosen not in ("", ADVERTISE_AUTO):
        if is_wildcard(chosen):
            raise ConfigError(
                f"--advertise: value was {chosen}; must be an address that others can connect to, or auto"
            )
        return bare(chosen)
    index_host, port = _index_place(config.index_url)
    if not is_wildcard(host):
        if _has(host, "is_loopback") and not _is_local(index_host, port):
            logger.warning("listening on %s, which only this machine reaches; the index is at %s", host, index_host)
        return bare(host)
    family = socket.AF_INET if _has(host, "version", 4) else socket.AF_UNSPEC
    found = _sources(index_host, port, family, source)
    for address in found:
        if not (_has(address, "is_loopback") or _has(address, "is_link_local")):
            return address
    if found and _is_local(index_host, port):
        return found[0]
    what = f"only {', '.join(found)}" if found else "no address"
    raise ConfigError(
        f"--advertise: value was auto, and on the way to the index at {index_host} this machine has {what}; "
        "must be a host or address that other machines reach this process by"
    )


def _index_place(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return "localhost", INDEX_PORT
    return parts.hostname or "localhost", parts.port or INDEX_PORT


def _sources(host: str, port: int, family: int, source: SourceTowards) -> list[str]:
    """This machine's addresses on the way to a host, by the host's own addresses; those without a way are left out."""
    found: list[str] = []
    for own_family, address in _resolved(host, port, family):
        with suppress(OSError):
            found.append(source(own_family, address))
    return list(dict.fromkeys(found))


def _resolved(host: str, port: int, family: int) -> list[tuple[int, SocketAddress]]:
    try:
        places = socket.getaddrinfo(host, port, family, socket.SOCK_DGRAM)
    except OSError:
        return []
    return [(int(own_family), address) for own_family, _, _, _, address in places]


def _is_local(host: str, port: int) -> bool:
    """Whether a host is this machine by name: whoever uses an index there is on this machine, too."""
    addresses = [str(address[0]) for _, address in _resolved(host, port, socket.AF_UNSPEC)]
    return bool(addresses) and all(_has(address, "is_loopback") for address in addresses)


def _has(host: str, attribute: str, value: object = True) -> bool:
    """Whether a host is an IP address of which that is so."""
    try:
        address = ipaddress.ip_address(bare(host).partition("%")[0])
    except ValueError:
        return False
    return bool(getattr(address, attribute) == value)
