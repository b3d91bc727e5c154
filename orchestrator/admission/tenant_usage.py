"""Running requests and recent tokens of each tenant, against the limits of its key."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from bough.errors import Exhausted
from bough.protocol.generation import Event, Finished, Started, Tokens
from bough.security.api_keys import ApiKey

MINUTE_SECONDS = 60.0
RETRY_SECONDS = 1.0  # after which one of the tenant's running requests may have ended


@dataclass(slots=True)
class _Account:
    """The account of one tenant."""

    num_running: int = 0
    num_owed: float = 0.0  # used tokens, minus the rate limit's tokens for the time since
    settled_at: float = 0.0  # seconds on the clock

    def settle(self, now: float, per_minute: int) -> None:
        """Deduct the rate limit's tokens for the time since the last settlement."""
        paid = (now - self.settled_at) * per_minute / MINUTE_SECONDS
        self.num_owed, self.settled_at = max(0.0, self.num_owed - paid), now


@dataclass(slots=True)
class Usage:
    """All tenants' accounts. Requests are accepted while a tenant owes less than a minute's tokens."""

    clock: Callable[[], float] = time.monotonic
    _accounts: dict[str, _Account] = field(default_factory=dict)

    @contextmanager
    def request(self, key: ApiKey) -> Iterator[Callable[[Event], None]]:
        """Count a request; the block gets a function that must be called with each of its events.

        Raises:
            Exhausted: the tenant has reached its limit of requests or tokens; has a retry delay.
        """
        account = self._accounts.setdefault(key.name, _Account(settled_at=self.clock()))
        self._require_room(key, account)
        account.num_running += 1
        try:
            yield lambda event: self._observe(account, key, event)
        finally:
            account.num_running -= 1

    def _require_room(self, key: ApiKey, account: _Account) -> None:
        if key.requests and account.num_running >= key.requests:
            raise Exhausted(f"requests: {key.requests} of this key run, which is its limit", RETRY_SECONDS)
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
            case Finished():
                return
        if key.tokens_per_minute:
            account.settle(self.clock(), key.tokens_per_minute)
            account.num_owed += used
