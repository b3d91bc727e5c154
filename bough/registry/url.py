"""Parsing of index URLs, and their display without passwords.

redis[s]://[user][:password]@host[:port][/database][?setting=...] is one server, or one with replicas.
redis[s]+cluster://[user][:password]@host[:port][?setting=...] is a cluster, named by any of its nodes.
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

PASSWORD_FILE = "password_file"  # its first line is the password; read anew for each connection
SETTINGS = ("client_name", "db", "password", PASSWORD_FILE, "username")  # allowed in the query, besides ssl_...
CLUSTER = "+cluster"
FORM = (
    "must be redis://[user:password@]host[:port][/database][?setting=...], with rediss for TLS and +cluster before :// "
    f"for a cluster, or unix://path; settings are {', '.join(SETTINGS)} and ssl_...; in a name and a password "
    "/ ? # @ : % & are written as %2F %3F %23 %40 %3A %25 %26"
)


class IndexAddress(NamedTuple):
    """A parsed index URL."""

    url: str  # for redis-py
    is_cluster: bool
    password_file: str = ""


def read_address(url: str) -> IndexAddress:
    """Parse a URL; raises ValueError for what redis-py would ignore, fail on later, or misread."""
    scheme, separator, rest = url.partition("://")
    is_cluster = scheme.endswith(CLUSTER)
    if is_cluster:
        url = scheme.removesuffix(CLUSTER) + separator + rest
    parts = urlsplit(url)
    if parts.scheme != "unix" and ("@" in parts.path or "#" in url):
        # redis-py would read part of the password as the port.
        raise ValueError("must not have / or # before @, or # anywhere")
    query = parse_qsl(parts.query, keep_blank_values=True)
    for name, _ in query:
        if name not in SETTINGS and not name.startswith("ssl_"):
            raise ValueError(f"{name}: unknown setting")
    if parts.scheme in ("redis", "rediss") and not re.fullmatch(r"(/[0-9]*)?", parts.path):
        raise ValueError(f"database must be a number, got {parts.path}")
    if is_cluster and (parts.scheme not in ("redis", "rediss") or parts.path not in ("", "/", "/0")):
        raise ValueError(f"{parts.scheme}{CLUSTER} and {parts.path}: a cluster has only database 0")
    password_file = dict(query).get(PASSWORD_FILE, "")
    if password_file:
        if parts.username or parts.password or {"username", "password"} & dict(query).keys():
            raise ValueError(f"{PASSWORD_FILE}: must not be given beside a user or a password")
        url = parts._replace(query=urlencode([each for each in query if each[0] != PASSWORD_FILE])).geturl()
    return IndexAddress(url, is_cluster, password_file)


def without_passwords(url: str) -> str:
    """A URL safe to display; "***" if it is malformed and may contain a password."""
    scheme, separator, rest = url.partition("://")
    credentials, at, server = rest.rpartition("@")
    if not re.fullmatch(r"[\w+]*", scheme) or re.search("[/?#]", credentials):
        return "***" if _may_hold_password(url) else url
    if ":" in credentials:
        credentials = credentials.partition(":")[0] + ":***"
    server, question, query = server.partition("?")
    return f"{scheme}{separator}{credentials}{at}{server}{question}{_shown(query)}"


def explain(url: str, fault: Exception) -> str:
    """The error text for an invalid URL; the cause's own text is left out if it may repeat a password."""
    reason = "" if _may_hold_password(url) else f": {fault}"
    return f"index_url: {FORM}, got {without_passwords(url)!r}{reason}"


def _may_hold_password(url: str) -> bool:
    plain = unquote(url).replace(PASSWORD_FILE, "")
    return "@" in plain or "password" in plain


def _shown(query: str) -> str:
    """Query settings up to the first that may be a password, as a password may contain &."""
    shown = []
    for setting in query.split("&") if query else ():
        name, equals, value = setting.partition("=")
        is_open = name == PASSWORD_FILE or (
            re.fullmatch(r"db|client_name|username|ssl_\w+", name) and "password" not in name
        )
        shown.append(f"{name}{equals}{value if is_open else '***'}" if equals else "***")
        if not is_open:
            break
    return "&".join(shown)
