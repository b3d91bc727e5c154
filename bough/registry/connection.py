"""The connection to the index's server, or to its cluster: scripts go out, answers come back, within seconds.

This is the only file that knows redis-py.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import MovedError, NoScriptError, RedisClusterException, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from bough.concurrency.tasks import cancellable
from bough.errors import ConfigError, Unavailable
from bough.registry.keys import require_text
from bough.registry.url import IndexAddress, explain, read_address, without_passwords

TIMEOUT_SECONDS = 2.0  # to connect, and to answer
CALL_SECONDS = 6.0  # in all: one more try, and the wait for a turn
AWAITED_SECONDS = 1.0  # where a request waits for the answer: it can do without
SILENT_SECONDS = 7.0  # longer than a look at an index that does not answer: between two of them it stays silent
MAX_CONNECTIONS = 16
FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")  # settings in a URL
Value = str | bytes | int  # that a script is given
SCRIPTS = Path(__file__).parent / "lua"


class Call(Enum):
    """Who makes a call, and so how long it may take and whether it goes out to an index that was silent before."""

    LOOK = "look"  # made again and again whatever comes of it: it finds out when the index is back
    BEHIND = "behind"  # nobody waits for it
    AWAITED = "awaited"  # a request waits for it


class IndexConnection:
    """Runs the scripts in `bough/registry/lua`; every failure is Unavailable.

    An index that lets a call wait for nothing, as one behind a network that drops all packets does, is silent from then
    on: calls fail at once until a look at it is answered.
    """

    def __init__(self, url: str) -> None:
        """Nothing is connected yet. Raises ConfigError for a URL with something wrong, without its password."""
        self.safe_url = without_passwords(url)
        self._turns = asyncio.Semaphore(MAX_CONNECTIONS)  # first come, first served, as redis-py's own queue is not
        self._silent_until = 0.0  # seconds on the monotonic clock
        _require_files(url)
        try:
            self.redis = _client(read_address(url))
        except (ValueError, TypeError, RedisError, RedisClusterException) as exc:
            raise ConfigError(explain(url, exc)) from None  # whose own text may hold a password
        prelude = (SCRIPTS / "prelude.lua").read_text()
        self._scripts = {path.stem: prelude + path.read_text() for path in SCRIPTS.glob("*.lua")}
        self._digests = {name: hashlib.sha1(text.encode()).hexdigest() for name, text in self._scripts.items()}

    async def close(self) -> None:
        """Gives the connections back."""
        await self.redis.aclose()

    async def run(self, call: Call, script: str, keys: Sequence[str | bytes], args: Sequence[Value]) -> Any:
        """What a script answers. Raises Unavailable for whatever goes wrong, and InvalidRequest for what is no text."""
        if call is not Call.LOOK and time.monotonic() < self._silent_until:
            raise Unavailable(f"the index at {self.safe_url} does not answer: it was silent a moment ago")
        for text in (*keys, *args):
            if isinstance(text, str):
                require_text(script, text)  # redis-py would cut all connections
        limit_seconds = AWAITED_SECONDS if call is Call.AWAITED else CALL_SECONDS
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
        except (RedisError, RedisClusterException, OSError) as exc:
            raise Unavailable(f"the index at {self.safe_url} does not answer: {exc}") from exc
        except (ValueError, TypeError) as exc:  # redis-py, too, stumbles over what no such server would say
            raise await self.nonsense(exc) from exc
        self._silent_until = 0.0
        return answer

    async def nonsense(self, exc: Exception) -> Unavailable:
        """The error for an answer that no index would give; what else is on the way from there is not waited for."""
        if isinstance(self.redis, redis.asyncio.Redis):
            await self.redis.connection_pool.disconnect()
        else:
            await self.redis.aclose()  # it connects anew with its next call
        return Unavailable(f"what answers at {self.safe_url} is no index: {exc}")

    async def _evaluate(self, script: str, keys: Sequence[str | bytes], args: Sequence[Value]) -> Any:
        """By the script's hash, or whole to a server that does not know it yet."""
        evaluate = self.redis.execute_command
        try:
            return await evaluate("EVALSHA", self._digests[script], len(keys), *keys, *args)
        except NoScriptError:
            return await evaluate("EVAL", self._scripts[script], len(keys), *keys, *args)


def _require_files(url: str) -> None:
    """Raises ConfigError, with nothing of the URL, where it names a file for TLS that is not there."""
    for name, path in parse_qsl(urlsplit(url).query):
        if name in FILES and not os.access(path, os.R_OK):
            raise ConfigError(f"index_url: {name} must be a PEM file that can be read")


def _client(address: IndexAddress) -> redis.asyncio.Redis | redis.asyncio.RedisCluster:
    """Raises ValueError, TypeError or RedisError for a URL that cannot be."""
    retry = Retry(NoBackoff(), 1)  # one, for a connection that the server has closed meanwhile
    if address.is_cluster:
        return redis.asyncio.RedisCluster.from_url(
            address.url,
            max_connections=MAX_CONNECTIONS,
            socket_timeout=TIMEOUT_SECONDS,
            socket_connect_timeout=TIMEOUT_SECONDS,
            retry=retry,
        )
    pool = redis.asyncio.ConnectionPool.from_url(
        address.url,
        max_connections=MAX_CONNECTIONS,
        socket_timeout=TIMEOUT_SECONDS,
        socket_connect_timeout=TIMEOUT_SECONDS,
        retry=retry,
    )
    pool.make_connection()  # type: ignore[no-untyped-call]  # it reads its settings, and connects to nothing
    return redis.asyncio.Redis.from_pool(pool)
