"""The address of the index, as users write it.

redis[s]://[user][:password]@host[:port][/database][?setting=...] is one server, or one with replicas.
redis[s]+cluster://[user][:password]@host[:port][?setting=...] is a cluster, of which one node is enough to begin with.
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

SETTINGS = ("client_name", "db", "password", "username")  # in the query, beside those of TLS
CLUSTER = "+cluster"
FORM = (
    "must be redis://[user:password@]host[:port][/database][?setting=...], with rediss for TLS and +cluster before :// "
    f"for a cluster, or unix://path; settings are {', '.join(SETTINGS)} and ssl_...; in a name and a password "
    "/ ? # @ : % & are written as %2F %3F %23 %40 %3A %25 %26"
)


class IndexAddress(NamedTuple):
    """Where the index is."""

    url: str  # as redis-py reads it
    is_cluster: bool


def read_address(url: str) -> IndexAddress:
    """Raises ValueError for what redis-py would pass over, choke on later, or take for something else."""
    scheme, separator, rest = url.partition("://")
    is_cluster = scheme.endswith(CLUSTER)
    if is_cluster:
        url = scheme.removesuffix(CLUSTER) + separator + rest
    parts = urlsplit(url)
    if parts.scheme != "unix" and ("@" in parts.path or "#" in url):  # the beginning of a password would be the port
        raise ValueError("a / or # stands before an @, or a # at the end")
    for name, _ in parse_qsl(parts.query, keep_blank_values=True):
        if name not in SETTINGS and not name.startswith("ssl_"):
            raise ValueError(f"{name}: no such setting")
    if parts.scheme in ("redis", "rediss") and not re.fullmatch(r"(/[0-9]*)?", parts.path):
        raise ValueError(f"{parts.path}: no number of a database")
    if is_cluster and (parts.scheme not in ("redis", "rediss") or parts.path not in ("", "/", "/0")):
        raise ValueError(f"{parts.scheme}{CLUSTER} and {parts.path}: a cluster has one database, which is 0")
    return IndexAddress(url, is_cluster)


def without_passwords(url: str) -> str:
    """Fit to be shown, whatever is wrong with it: where it cannot be told what is a password, nothing is."""
    scheme, separator, rest = url.partition("://")
    credentials, at, server = rest.rpartition("@")
    if not re.fullmatch(r"[\w+]*", scheme) or re.search("[/?#]", credentials):
        return "***" if _may_hold_password(url) else url
    if ":" in credentials:
        credentials = credentials.partition(":")[0] + ":***"
    server, question, query = server.partition("?")
    return f"{scheme}{separator}{credentials}{at}{server}{question}{_shown(query)}"


def explain(url: str, fault: Exception) -> str:
    """What is wrong with a URL. The fault's own words may repeat a password: they are left out where one may be."""
    reason = "" if _may_hold_password(url) else f": {fault}"
    return f"index_url: value was {without_passwords(url)!r}; {FORM}{reason}"


def _may_hold_password(url: str) -> bool:
    plain = unquote(url)
    return "@" in plain or "password" in plain


def _shown(query: str) -> str:
    """Settings up to the first that may be a password, which may go on behind an &."""
    shown = []
    for setting in query.split("&") if query else ():
        name, equals, value = setting.partition("=")
        is_open = re.fullmatch(r"db|client_name|username|ssl_\w+", name) and "password" not in name
        shown.append(f"{name}{equals}{value if is_open else '***'}" if equals else "***")
        if not is_open:
            break
    return "&".join(shown)
