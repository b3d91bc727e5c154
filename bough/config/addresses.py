"""Listening addresses, and the address that a process advertises to others, which may differ."""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from random import SystemRandom
from typing import Any
from urllib.parse import urlsplit

from bough.config.processes import ADVERTISE_AUTO, OrchestratorConfig, ServiceConfig, TargetConfig
from bough.errors import ConfigError

logger = logging.getLogger(__name__)

INDEX_PORT = 6379  # default of index URLs
# Below those of outgoing connections, which could otherwise take one before its server listens.
PORTS = range(20_000, 32_000)
_returned: set[int] = set()  # by `free_port`; their servers may not listen yet
SocketAddress = tuple[Any, ...]  # of an IPv4 or IPv6 socket
SourceTowards = Callable[[int, SocketAddress], str]  # (address family, destination) to source address


def joined(host: str, port: int) -> str:
    """Join host and port as 127.0.0.1:7411, or [::1]:7411 for an IPv6 address."""
    host = bare(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bare(host: str) -> str:
    """The host without brackets."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def is_wildcard(host: str) -> bool:
    """Whether the host means all addresses of this machine, to which nobody can connect."""
    return bare(host) == "" or _has(host, "is_unspecified")


def has_page(config: OrchestratorConfig) -> bool:
    """Whether the page at /ui is served; by default only if other machines cannot reach it."""
    return config.ui == "yes" or (config.ui == "auto" and is_loopback(config.host))


def is_loopback(host: str) -> bool:
    """Whether the host is localhost or a loopback address; other names are not resolved."""
    return bare(host) == "localhost" or _has(host, "is_loopback")


def free_port(host: str, wanted: int = 0) -> int:
    """The port `wanted` if it is free, otherwise a new one of PORTS; 0 if the host is not this machine's."""
    others = [port for port in SystemRandom().sample(PORTS, 16) if port not in _returned]
    for port in [wanted, *others] if wanted else others:
        with suppress(OSError), bound(host, port):
            _returned.add(port)
            return port
    return 0


def bound(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen; lingering connections do not matter. Raises OSError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except UnicodeError as exc:  # a name with empty labels, such as "a..b"
        raise OSError(f"{host!r} is not a host name: {exc}") from exc
    probe = socket.socket(family, kind, protocol)
    try:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
    except OSError:
        probe.close()
        raise
    return probe


def require_free_ports(host: str, ports: Mapping[str, int]) -> None:
    """Raise ConfigError for a port that is in use, or that two settings share; 0 and less are skipped.

    The server reports other errors of an address.
    """
    given: dict[int, str] = {}
    for name, port in ports.items():
        if port <= 0:
            continue
        if (other := given.setdefault(port, name)) != name:
            raise ConfigError(f"{name}: must be another port than {other}, got {port} for both")
        try:
            bound(host, port).close()
        except OSError as exc:
            if exc.errno in (errno.EADDRINUSE, errno.EACCES):
                problem = f"must be a free port of {host}, or 0 for any, got {port} ({exc.strerror})"
                raise ConfigError(f"{name}: {problem}") from exc


def source_towards(family: int, address: SocketAddress) -> str:
    """The source address of this machine towards `address`. Sends nothing; raises OSError without a route."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def advertised_host(config: ServiceConfig, source: SourceTowards = source_towards) -> str:
    """The host that a process advertises; may block while it resolves the index's host name.

    Raises:
        ConfigError: --advertise is auto, and no address is found that other machines could reach.
    """
    chosen, host = config.advertise, config.host
    if chosen not in ("", ADVERTISE_AUTO):
        if is_wildcard(chosen):
            raise ConfigError(f"--advertise: must be auto or an address that others can connect to, got {chosen}")
        return bare(chosen)
    peer, (peer_host, port) = _peer_place(config)
    if not is_wildcard(host):
        if _has(host, "is_loopback") and not _is_local(peer_host, port):
            logger.warning("listening on %s, which only this machine can reach; %s is at %s", host, peer, peer_host)
        return bare(host)
    family = socket.AF_INET if _has(host, "version", 4) else socket.AF_UNSPEC
    found = _sources(peer_host, port, family, source)
    for address in found:
        if not (_has(address, "is_loopback") or _has(address, "is_link_local")):
            return address
    if found and _is_local(peer_host, port):
        return found[0]
    what = f"only {', '.join(found)}" if found else "no address"
    raise ConfigError(
        "--advertise: must be a host or address at which other machines reach this process, got auto, and towards the "
        f"{peer.removeprefix('the ')} at {peer_host} this machine has {what}"
    )


def _peer_place(config: ServiceConfig) -> tuple[str, tuple[str, int]]:
    """What every other process reaches too, and where it is: the index, or the head of a stage."""
    if isinstance(config, TargetConfig) and config.stage_of:
        parts = urlsplit(f"//{config.stage_of}")
        return "the head", (parts.hostname or "localhost", parts.port or 0)
    return "the index", _index_place(config.index_url)


def _index_place(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return "localhost", INDEX_PORT
    return parts.hostname or "localhost", parts.port or INDEX_PORT


def _sources(host: str, port: int, family: int, source: SourceTowards) -> list[str]:
    """This machine's source addresses towards all addresses of a host that have a route."""
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
    """Whether a host resolves to loopback addresses only."""
    addresses = [str(address[0]) for _, address in _resolved(host, port, socket.AF_UNSPEC)]
    return bool(addresses) and all(_has(address, "is_loopback") for address in addresses)


def _has(host: str, attribute: str, value: object = True) -> bool:
    """Whether the host is an IP address whose `attribute` equals `value`."""
    try:
        address = ipaddress.ip_address(bare(host).partition("%")[0])
    except ValueError:
        return False
    return bool(getattr(address, attribute) == value)
