"""Authenticates callers of APIs by a file of keys, which is reloaded when it changes."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Iterable

from bough.security.api_keys import ApiKey, hash_of, read_keys
from bough.security.bearer import key_in, refusal
from bough.security.watched_file import WatchedFile


class Keyring:
    """Finds a key's holder in constant time."""

    def __init__(self, path: str, clock: Callable[[], float] = time.time) -> None:
        """`clock` is in seconds since 1970. Raises ConfigError for an unusable file."""
        self.file: WatchedFile[tuple[ApiKey, ...]] = WatchedFile("--keys", path, read_keys)
        self._clock = clock

    def holder(self, authorization: Iterable[str | bytes]) -> ApiKey:
        """The key that a call has shown, from all values of its header.

        Raises:
            Unauthenticated: it is unknown or has expired.
        """
        shown, found = hash_of(key_in(authorization)), None
        for key in self.file.value:  # compares with all, for constant time
            if hmac.compare_digest(key.sha256, shown):
                found = key
        if found is None or found.has_expired(self._clock()):
            raise refusal()
        return found
