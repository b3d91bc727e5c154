"""The shared secret of a deployment's processes, which workers require."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from bough.errors import ConfigError
from bough.security.api_keys import MAX_KEY_LENGTH, credentials, hash_of, key_in, refusal, require_key
from bough.security.private_files import WatchedFile

SETTING = "--worker-key-file"
LEAST_LENGTH = 32  # characters; 128 bits in hexadecimal digits


class WorkerKey:
    """Keys in a file, one per line: the first is shown, all are accepted, so that each can be replaced."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError for an unusable file."""
        self.file: WatchedFile[tuple[str, ...]] = WatchedFile(SETTING, path, read_secrets)

    @property
    def credentials(self) -> tuple[tuple[str, str], ...]:
        """Metadata of a call."""
        return credentials(self.file.value[0])

    def require(self, authorization: Iterable[str | bytes]) -> None:
        """Raise Unauthenticated unless a call shows a key, from all values of its header."""
        if not self.is_shown(authorization):
            raise refusal()

    def is_shown(self, authorization: Iterable[str | bytes]) -> bool:
        """Whether a call shows one of the keys; in constant time."""
        shown, is_known = hash_of(key_in(authorization)), False
        for secret in self.file.value:
            is_known |= hmac.compare_digest(hash_of(secret), shown)
        return is_known


def read_secrets(where: str, text: str) -> tuple[str, ...]:
    """Parse the keys of a file. Raises ConfigError, without them."""
    secrets = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not secrets or min(map(len, secrets)) < LEAST_LENGTH:
        raise ConfigError(
            f"{where}: must have a key a line, each of {LEAST_LENGTH} to {MAX_KEY_LENGTH} characters, such as "
            "`openssl rand -hex 32` makes"
        )
    return tuple(require_key(where, secret) for secret in secrets)
