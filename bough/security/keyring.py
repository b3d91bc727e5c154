"""Who may come in at the front doors: the keys of a file, as it is now."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Iterable

from bough.security.api_keys import ApiKey, hash_of, read_keys
from bough.security.bearer import key_in, refusal
from bough.security.watched_file import WatchedFile


class Keyring:
    """Finds whose a key is, in a time that tells nothing of the keys that are known."""

    def __init__(self, path: str, clock: Callable[[], float] = time.time) -> None:
        """`clock` is in seconds since 1970. Raises ConfigError for a file that cannot be used."""
        self.file: WatchedFile[tuple[ApiKey, ...]] = WatchedFile("--keys", path, read_keys)
        self._clock = clock

    def holder(self, authorization: Iterable[str | bytes]) -> ApiKey:
        """Whose key a call has shown, by all values of its header.

        Raises:
            Unauthenticated: nobody's that may come in now.
        """
        shown, found = hash_of(key_in(authorization)), None
        for key in self.file.value:  # all of them, whichever it is
            if hmac.compare_digest(key.sha256, shown):
                found = key
        if found is None or found.has_expired(self._clock()):
            raise refusal()
        return found
