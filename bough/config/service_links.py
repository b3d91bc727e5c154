"""Recognises the environment variables that Kubernetes (and Docker links) set in each container for each Service.

Those of a Service named `bough-orchestrator` start like our settings. They are recognised by the exact form of name and
value, so that a mistyped setting is still refused.
"""

from __future__ import annotations

import ipaddress
import re

_PROTOCOLS = ("tcp", "udp", "sctp")
_PORT_NAME = re.compile(r"_SERVICE_PORT(_[A-Z0-9_]+)?$")
_URL_NAME = re.compile(r"_PORT(?:_(?P<port>[0-9]+)_(?P<protocol>TCP|UDP|SCTP))?$")
_PART_NAME = re.compile(r"_PORT_(?P<port>[0-9]+)_(?P<protocol>TCP|UDP|SCTP)_(?P<part>PROTO|PORT|ADDR)$")
_URL = re.compile(r"(?P<protocol>[a-z]+)://(?P<host>\[[^]]+\]|[^:]+):(?P<port>[0-9]+)")


def is_service_link(name: str, value: str) -> bool:
    """Whether an environment variable describes a Service."""
    if name.endswith("_SERVICE_HOST"):
        return _is_ip(value)
    if _PORT_NAME.search(name) and _is_port(value):
        return True
    if part := _PART_NAME.search(name):
        expected = {"PROTO": value == part["protocol"].lower(), "PORT": value == part["port"]}
        return expected.get(part["part"], _is_ip(value))
    url_name, url = _URL_NAME.search(name), _URL.fullmatch(value)
    if url_name is None or url is None or url["protocol"] not in _PROTOCOLS or not _is_ip(url["host"].strip("[]")):
        return False
    return url_name["port"] in (None, url["port"]) and url_name["protocol"] in (None, url["protocol"].upper())


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and 1 <= int(text) <= 65535
