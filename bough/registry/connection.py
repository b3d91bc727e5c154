"""The connection to the index's server or cluster, which runs Lua scripts with timeouts; the only user of redis-py."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import (
    AuthenticationError,
    MovedError,
    NoScriptError,
    RedisClusterException,
    RedisError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from bough.concurrency.tasks import cancellable
from bough.errors import ConfigError, Unavailable
from bough.protocol.codec_generation import require_text
from bough.security.private_files import read_file

TIMEOUT_SECONDS = 2.0  # to connect, and to answer
CALL_SECONDS = 6.0  # total for one call: a retry and the wait for a connection included
AWAITED_SECONDS = 1.0  # total for a call that a request waits for, but does not depend on
SILENT_SECONDS = 7.0  # time after a timeout in which calls fail at once; longer than one probe (CallKind.LOOK) can take
MAX_CONNECTIONS = 16
FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")  # URL settings that name files
Value = str | bytes | int  # an argument's type
SCRIPTS = Path(__file__).parent / "lua"
PASSWORD_FILE = "password_file"  # its first line is the password; read again for each connection
SETTINGS = ("client_name", "db", "password", PASSWORD_FILE, "username")  # allowed in the query, besides ssl_...
CLUSTER = "+cluster"
FORM = (
    "must be redis://[user:password@]host[:port][/database][?setting=...], with rediss for TLS and +cluster before :// "
    f"for a cluster, or unix://path; settings are {', '.join(SETTINGS)} and ssl_...; in a name and a password "
    "/ ? # @ : % & are written as %2F %3F %23 %40 %3A %25 %26"
)


class CallKind(Enum):
    """The kind of a call, which sets its timeout and whether it is made after the index timed out."""

    LOOK = "look"  # periodic: always made, and so detects that the index is back
    BEHIND = "behind"  # in the background
    AWAITED = "awaited"  # a request waits for it


class IndexConnection:
    """Runs the scripts in `bough/registry/lua`; every failure is Unavailable.

    It is a circuit breaker: after a timeout, as in a network that drops packets, calls other than CallKind.LOOK fail at
    once until a call succeeds or SILENT_SECONDS pass.
    """

    def __init__(self, url: str) -> None:
        """Does not connect yet. Raises ConfigError, without passwords, for an invalid URL."""
        self.safe_url = without_passwords(url)
        self._turns = asyncio.Semaphore(MAX_CONNECTIONS)  # first come, first served, unlike redis-py's own queue
        self._silent_until = 0.0  # seconds on the monotonic clock
        try:
            self.redis = _client(read_address(url))
            _require_files(url)
        except (ValueError, TypeError, RedisError, RedisClusterException) as exc:
            raise ConfigError(explain(url, exc)) from None  # the cause's text may contain a password
        prelude = (SCRIPTS / "prelude.lua").read_text()
        self._scripts = {path.stem: prelude + path.read_text() for path in SCRIPTS.glob("*.lua")}
        self._digests = {name: hashlib.sha1(text.encode()).hexdigest() for name, text in self._scripts.items()}

    async def close(self) -> None:
        await self.redis.aclose()

    async def run(self, call: CallKind, script: str, keys: Sequence[str | bytes], args: Sequence[Value]) -> Any:
        """Run a script and return its reply. Raises Unavailable for any failure, InvalidRequest for invalid UTF-8."""
        if call is not CallKind.LOOK and time.monotonic() < self._silent_until:
            raise Unavailable(f"the index at {self.safe_url} does not answer: it was silent a moment ago")
        for text in (*keys, *args):
            if isinstance(text, str):
                require_text(script, text)  # redis-py would close all connections
        limit_seconds = AWAITED_SECONDS if call is CallKind.AWAITED else CALL_SECONDS
        try:
            with cancellable():
                async with asyncio.timeout(limit_seconds), self._turns:
                    answer = await self._evaluate(script, keys, args)
        except (TimeoutError, RedisTimeoutError) as exc:
            self._silent_until = time.monotonic() + SILENT_SECONDS
            raise Unavailable(f"the index at {self.safe_url} does not answer: {exc or 'it is silent'}") from exc
        except MovedError as exc:
            form = "its URL must begin with redis+cluster:// or rediss+cluster://"
            raise Unavailable(f"the index at {self.safe_url} is a node of a cluster; {form}") from exc
        except ResponseError as exc:
            raise Unavailable(f"the index at {self.safe_url} refuses: {exc}") from exc
        except AuthenticationError as exc:
            need = "needs its password: redis://:PASSWORD@... or ?password_file=FILE"
            raise Unavailable(f"the index at {self.safe_url} {need}; got: {exc}") from exc
        except (RedisError, RedisClusterException, OSError) as exc:
            raise Unavailable(f"the index at {self.safe_url} does not answer: {exc}") from exc
        except (ValueError, TypeError) as exc:  # redis-py cannot parse the reply
            raise await self.nonsense(exc) from exc
        self._silent_until = 0.0
        return answer

    async def nonsense(self, exc: Exception) -> Unavailable:
        """Disconnect, and return the error for a malformed reply."""
        if isinstance(self.redis, redis.asyncio.Redis):
            await self.redis.connection_pool.disconnect()
        else:
            await self.redis.aclose()  # it reconnects on its next call
        return Unavailable(f"the server at {self.safe_url} is not an index: {exc}")

    async def _evaluate(self, script: str, keys: Sequence[str | bytes], args: Sequence[Value]) -> Any:
        """Run a script by its hash, or send its text to a server that does not have it yet."""
        evaluate = self.redis.execute_command
        try:
            return await evaluate("EVALSHA", self._digests[script], len(keys), *keys, *args)
        except NoScriptError:
            return await evaluate("EVAL", self._scripts[script], len(keys), *keys, *args)


class _PasswordOfFile(CredentialProvider):
    """The first line of a file, read again for each connection."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError for a file that cannot be used."""
        self._path = path
        self._read()

    async def get_credentials_async(self) -> tuple[str]:
        """The password, read again for each connection. Raises AuthenticationError if the file cannot be used now."""
        try:
            return (await asyncio.to_thread(self._read),)
        except ConfigError as exc:
            raise AuthenticationError(str(exc)) from exc

    def _read(self) -> str:
        where = f"index_url: {PASSWORD_FILE}"
        lines = [line for each in read_file(where, self._path).splitlines() if (line := each.strip())]
        if not lines:
            raise ConfigError(f"{where}: {self._path} must have the password in its first line")
        return lines[0]


class _CurrentTls(redis.asyncio.SSLConnection):
    """Reads its certificates again for each connection, as they may have been renewed."""

    def _connection_arguments(self) -> Mapping[str, Any]:
        self.ssl_context.context = None
        arguments: Mapping[str, Any] = super()._connection_arguments()
        return arguments


def _require_files(url: str) -> None:
    """Raises ConfigError, without quoting the URL, if it names a TLS file that cannot be read."""
    for name, path in parse_qsl(urlsplit(url).query):
        if name in FILES and not os.access(path, os.R_OK):
            raise ConfigError(f"index_url: {name} must be a PEM file that can be read")


def _client(address: IndexAddress) -> redis.asyncio.Redis | redis.asyncio.RedisCluster:
    """Raises ValueError, TypeError or RedisError for an invalid URL."""
    settings: dict[str, Any] = {
        "max_connections": MAX_CONNECTIONS,
        "socket_timeout": TIMEOUT_SECONDS,
        "socket_connect_timeout": TIMEOUT_SECONDS,
        "retry": Retry(NoBackoff(), 1),  # one retry, for a connection that the server has closed
        "credential_provider": _PasswordOfFile(address.password_file) if address.password_file else None,
    }
    if address.is_cluster:
        cluster = redis.asyncio.RedisCluster.from_url(address.url, **settings)
        if cluster.connection_kwargs["connection_class"] is redis.asyncio.SSLConnection:
            cluster.connection_kwargs["connection_class"] = _CurrentTls  # of nodes that are found
            for node in cluster.startup_nodes:
                node.connection_class = _CurrentTls
        return cluster
    pool = redis.asyncio.ConnectionPool.from_url(address.url, **settings)
    if pool.connection_class is redis.asyncio.SSLConnection:
        pool.connection_class = _CurrentTls
    pool.make_connection()  # type: ignore[no-untyped-call]  # validates the settings without connecting
    return redis.asyncio.Redis.from_pool(pool)


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
            raise ValueError(f"{PASSWORD_FILE}: must not be given with a user or a password")
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
