"""The address of the index, as users write it: redis[s]://[user][:password]@host[:port][/database][?setting=...]."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, urlsplit

SETTINGS = ("client_name", "db", "password", "username")  # in the query, beside those of TLS


def refuse_unknown(url: str) -> None:
    """Refuses what redis-py would pass over or choke on later. Raises ValueError naming it."""
    parts = urlsplit(url)
    for name, _ in parse_qsl(parts.query):
        if name not in SETTINGS and not name.startswith("ssl_"):
            raise ValueError(f"{name}: no such setting; {', '.join(SETTINGS)} and ssl_... would do")
    if parts.scheme in ("redis", "rediss") and not re.fullmatch(r"(/[0-9]*)?", parts.path):
        raise ValueError(f"{parts.path}: no number of a database; one such as /0 would do")


def without_passwords(url: str) -> str:
    """Fit to be shown."""
    password = urlsplit(url).password
    url = url.replace(f":{password}@", ":***@") if password else url
    return re.sub(r"([?&]\w*password=)[^&#]*", r"\1***", url)
