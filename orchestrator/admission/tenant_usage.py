"""What a tenant has running and has used lately, against what its key allows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from bough.errors import Exhausted
from bough.protocol.generation import Event, Finished, Started, Tokens
from bough.security.api_keys import ApiKey

MINUTE_SECONDS = 60.0
RETRY_SECONDS = 1.0  # after which one of a tenant's own requests may have ended


@dataclass(slots=True)
class _Account:
    """One tenant's."""

    num_running: int = 0
    num_owed: float = 0.0  # tokens that were used and that the minutes since have not paid for
    settled_at: float = 0.0  # seconds on the clock

    def settle(self, now: float, per_minute: int) -> None:
        """What time has paid for is owed no more."""
        paid = (now - self.settled_at) * per_minute / MINUTE_SECONDS
        self.num_owed, self.settled_at = max(0.0, self.num_owed - paid), now


@dataclass(slots=True)
class Usage:
    """All tenants' accounts. Requests are let in while a tenant owes less than a minute's tokens; none is cut short."""

    clock: Callable[[], float] = time.monotonic
    _accounts: dict[str, _Account] = field(default_factory=dict)

    @contextmanager
    def request(self, key: ApiKey) -> Iterator[Callable[[Event], None]]:
        """One request, whose events are to be told to what the block is given.

        Raises:
            Exhausted: the tenant has as many requests as it may, or has used its tokens; with a delay.
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
            raise Exhausted(f"requests: {key.requests} of this key's run, as many as may at once", RETRY_SECONDS)
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
        """A prompt counts when it is let in, and output as it comes."""
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
