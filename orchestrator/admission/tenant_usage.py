"""Running requests and recent tokens of each tenant, against the limits of its key."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from bough.errors import Exhausted
from bough.protocol.generation import Event, Started, Tokens
from bough.security.api_keys import ApiKey

MINUTE_SECONDS = 60.0
MAX_SESSIONS = 10_000  # of a tenant whose key sets none: a tenth of what the index keeps
RETRY_SECONDS = 1.0  # after which one of the tenant's running requests may have ended


Count = Callable[[Event], None]  # is called with each event of a request


@dataclass(slots=True)
class _Session:
    """A named session of a tenant."""

    num_running: int = 0  # requests that wait for a place, or have one
    has_begun: bool = False  # whether one of its requests has; otherwise it goes with the last of them


@dataclass(slots=True)
class _Account:
    """The account of one tenant."""

    num_running: int = 0
    num_owed: float = 0.0  # used tokens, minus the rate limit's tokens for the time since
    settled_at: float = 0.0  # seconds on the clock
    sessions: dict[str, _Session] = field(default_factory=dict)  # by name; last used last

    def settle(self, now: float, per_minute: int) -> None:
        """Deduct the rate limit's tokens for the time since the last settlement."""
        paid = (now - self.settled_at) * per_minute / MINUTE_SECONDS
        self.num_owed, self.settled_at = max(0.0, self.num_owed - paid), now


@dataclass(slots=True)
class TenantUsage:
    """All tenants' accounts. Requests are accepted while a tenant owes less than a minute's tokens."""

    clock: Callable[[], float] = time.monotonic
    _accounts: dict[str, _Account] = field(default_factory=dict)

    @contextmanager
    def request(self, key: ApiKey, session: str = "", num: int = 1) -> Iterator[Count]:
        """Count `num` requests of one call, in a named session or in none.

        The block gets a function to be called with each event.

        Raises:
            Exhausted: the tenant has reached its limit of requests, sessions or tokens; has a retry delay.
        """
        account = self._account(key)
        self._require_room(key, account, session, num)
        account.num_running += num
        running = account.sessions.pop(session, None) or _Session()
        running.num_running += 1
        if session:
            account.sessions[session] = running

        def observe(event: Event) -> None:
            running.has_begun |= isinstance(event, Started)
            self._observe(account, key, event)

        try:
            yield observe
        finally:
            account.num_running -= num
            running.num_running -= 1
            if not running.num_running and not running.has_begun:
                account.sessions.pop(session, None)

    def surplus(self, key: ApiKey) -> list[str]:
        """The least recently used idle sessions beyond a tenant's limit, to be closed and forgotten."""
        sessions = self._accounts[key.name].sessions
        num_begun = sum(session.has_begun for session in sessions.values())
        idle = [name for name, session in sessions.items() if not session.num_running]
        return idle[: max(0, num_begun - _most_sessions(key))]

    def forget(self, key: ApiKey, name: str) -> None:
        """Remove a session that was closed, once no request runs in it."""
        account = self._accounts.get(key.name)
        if account is None or (session := account.sessions.get(name)) is None:
            return
        session.has_begun = False
        if not session.num_running:
            del account.sessions[name]

    def _require_room(self, key: ApiKey, account: _Account, session: str, num: int) -> None:
        others = (one for name, one in account.sessions.items() if name != session)
        if session and (num_busy := sum(one.num_running > 0 for one in others)) >= _most_sessions(key):
            raise Exhausted(f"sessions: a request runs in each of the {num_busy} of this key", RETRY_SECONDS)
        if key.requests and account.num_running + num > key.requests:
            limit = f"and {num} more are above its limit of {key.requests}"
            raise Exhausted(f"requests: {account.num_running} of this key run, {limit}", RETRY_SECONDS)
        if not key.tokens_per_minute:
            return
        account.settle(self.clock(), key.tokens_per_minute)
        beyond = account.num_owed - key.tokens_per_minute
        if beyond >= 0:
            seconds = max(RETRY_SECONDS, beyond * MINUTE_SECONDS / key.tokens_per_minute)
            raise Exhausted(
                f"tokens_per_minute: this key's {key.tokens_per_minute} are used; more in {seconds:.1f} s", seconds
            )

    def _observe(self, account: _Account, key: ApiKey, event: Event) -> None:
        """Count the prompt on Started, and output as it comes."""
        match event:
            case Started():
                used = event.prompt_tokens
            case Tokens():
                used = len(event.token_ids)
            case _:  # the prompt of `PromptLogprobs` has been counted
                return
        self._charge(account, key, used)

    def charge(self, key: ApiKey, num_tokens: int) -> None:
        """Count tokens of a request that was refused."""
        self._charge(self._account(key), key, num_tokens)

    def _charge(self, account: _Account, key: ApiKey, num_tokens: int) -> None:
        if key.tokens_per_minute:
            account.settle(self.clock(), key.tokens_per_minute)
            account.num_owed += num_tokens

    def _account(self, key: ApiKey) -> _Account:
        return self._accounts.setdefault(key.name, _Account(settled_at=self.clock()))


def _most_sessions(key: ApiKey) -> int:
    return key.sessions or MAX_SESSIONS
