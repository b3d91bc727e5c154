"""Keys of applications and workers: making them, their files, and keys in calls: `authorization: Bearer KEY`.

Each line of the file of tenants' keys is a JSON object: a tenant's name, the SHA-256 of a key, and limits. Several
lines may have the same name, so that a tenant can replace a key without a gap.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from bough.errors import ConfigError, Unauthenticated
from bough.runtime.log_lines import bounded
from bough.security.private_files import WatchedFile

PREFIX = "sk-bough-"
SECRET_BYTES = 32
ID_DIGITS = 12  # of a key's hash, used as its id
MAX_SHOWN = 80  # of an invalid value in an error
MAX_LIMIT = 10**12
LIMITS = ("requests", "tokens_per_minute", "sessions")
FIELDS = ("name", "sha256", "created", "expires", *LIMITS)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
HEADER = "authorization"
MAX_KEY_LENGTH = 512
_SCHEME = "bearer"
WORKER_SETTING = "--worker-key-file"
LEAST_LENGTH = 32  # characters; 128 bits in hexadecimal digits


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A tenant's key and limits. Limit 0 is none; expiry None is never."""

    name: str
    sha256: str
    created: str = ""
    expires: str | None = None  # ISO 8601, with a time zone
    requests: int = 0  # concurrent
    tokens_per_minute: int = 0  # of prompts and output
    sessions: int = 0  # named sessions

    @property
    def key_id(self) -> str:
        """Names the key among its tenant's, without revealing it."""
        return self.sha256[:ID_DIGITS]

    def has_expired(self, now: float) -> bool:
        """Whether the key has expired at `now`, in seconds since 1970."""
        return self.expires is not None and now >= datetime.fromisoformat(self.expires).timestamp()

    def to_line(self) -> str:
        """A line that `read_line` reads."""
        fields = {"name": self.name, "sha256": self.sha256, "created": self.created}
        others = {name: getattr(self, name) for name in ("expires", *LIMITS)}
        return json.dumps(fields | {name: value for name, value in others.items() if value})


def new_key() -> str:
    """A new random key."""
    return PREFIX + secrets.token_urlsafe(SECRET_BYTES)


def hash_of(key: str) -> str:
    """The stored hash of a key. Keys have 256 random bits, so that a fast unsalted hash is safe."""
    return hashlib.sha256(key.encode()).hexdigest()


def require_name(where: str, name: object) -> str:
    """Check a tenant's name. Raises ConfigError."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"{where}: must be 1 to 64 letters, digits, dots, hyphens and underscores, got {_shown(name)}"
        )
    return name


def require_time(where: str, text: object) -> str:
    """Normalise a time to UTC. Raises ConfigError without a time zone, as its meaning would depend on the machine."""
    try:
        moment = datetime.fromisoformat(text) if isinstance(text, str) else None
        if moment is not None and moment.tzinfo is not None:
            return moment.astimezone(UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError):  # OverflowError: beyond the year 9999 in UTC
        pass
    raise ConfigError(f"{where}: must be a time such as 2027-01-31T00:00:00Z, got {_shown(text)}")


def require_limit(where: str, value: object) -> int:
    """Check a limit. Raises ConfigError."""
    if type(value) is not int or not 0 <= value <= MAX_LIMIT:
        raise ConfigError(f"{where}: must be a number from 0 to {MAX_LIMIT}, got {_shown(value)}")
    return value


def read_keys(where: str, text: str) -> tuple[ApiKey, ...]:
    """All keys of a file. Raises ConfigError naming line and field, but never a value that may be a key."""
    numbered = ((f"{where}, line {number}", line) for number, line in enumerate(text.splitlines(), 1) if line.strip())
    keys = tuple(read_line(place, line) for place, line in numbered)
    seen: dict[str, str] = {}
    for key in keys:
        if key.sha256 in seen:
            raise ConfigError(f"{where}: every key must be one tenant's, got one of {seen[key.sha256]} and {key.name}")
        seen[key.sha256] = key.name
    return keys


def read_line(where: str, line: str) -> ApiKey:
    """Parse one line. Raises ConfigError."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise ConfigError(f"{where}: must be a JSON object, as `bough keys add` writes it")
    if not fields.keys() <= set(FIELDS):
        raise ConfigError(f"{where}: fields must be some of {', '.join(FIELDS)}, got another")
    sha256 = fields.get("sha256")
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise ConfigError(f"{where}: sha256: must be 64 hexadecimal digits in lower case")
    expires = fields.get("expires")
    return ApiKey(
        require_name(f"{where}: name", fields.get("name")),
        sha256,
        str(fields.get("created", "")),
        None if expires is None else require_time(f"{where}: expires", expires),
        **{name: require_limit(f"{where}: {name}", fields.get(name, 0)) for name in LIMITS},
    )


def _shown(value: object) -> str:
    return bounded(repr(value), MAX_SHOWN)


class Keyring:
    """Finds the tenant of a key in constant time."""

    def __init__(self, path: str, clock: Callable[[], float] = time.time) -> None:
        """`clock` is in seconds since 1970. Raises ConfigError for an unusable file."""
        self.file: WatchedFile[tuple[ApiKey, ...]] = WatchedFile("--keys", path, read_keys)
        self._clock = clock

    def holder(self, authorization: Iterable[str | bytes]) -> ApiKey:
        """The entry of a call's key, from all values of its header.

        Raises:
            Unauthenticated: it is unknown or has expired.
        """
        shown, found = hash_of(key_in(authorization)), None
        for key in self.file.value:  # compares with every key, for constant time
            if hmac.compare_digest(key.sha256, shown):
                found = key
        if found is None or found.has_expired(self._clock()):
            raise refusal()
        return found


def credentials(key: str) -> tuple[tuple[str, str], ...]:
    """Metadata of a call; empty without a key."""
    return ((HEADER, f"Bearer {key}"),) if key else ()


def require_key(field: str, key: str) -> str:
    """Check a key. Raises ConfigError, without the key, if a header cannot carry it."""
    if not (key.isascii() and key.isprintable() and len(key) <= MAX_KEY_LENGTH) or " " in key:
        raise ConfigError(f"{field}: must be at most {MAX_KEY_LENGTH} visible ASCII characters without spaces")
    return key


def key_in(values: Iterable[str | bytes]) -> str:
    """The key in all values of a call's header; empty unless there is exactly one."""
    given = [value if isinstance(value, str) else value.decode("latin-1") for value in values]
    if len(given) != 1:
        return ""
    scheme, _, key = given[0].strip().partition(" ")
    return key.strip() if scheme.lower() == _SCHEME and len(key) <= MAX_KEY_LENGTH else ""


def refusal() -> Unauthenticated:
    """The only answer to missing, wrong and expired keys, so that nothing is revealed."""
    return Unauthenticated(
        "authorization: must be Bearer and a valid key; bough's client and commands read it from BOUGH_API_KEY"
    )


class WorkerKey:
    """Keys in a file, one per line: this process sends the first and accepts all, which allows replacing each."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError for an unusable file."""
        self.file: WatchedFile[tuple[str, ...]] = WatchedFile(WORKER_SETTING, path, read_secrets)

    @property
    def credentials(self) -> tuple[tuple[str, str], ...]:
        """Metadata of a call."""
        return credentials(self.file.value[0])

    def require(self, authorization: Iterable[str | bytes]) -> None:
        """Raise Unauthenticated unless a call has one of the keys, from all values of its header."""
        if not self.is_shown(authorization):
            raise Unauthenticated(
                "authorization: must be a worker key of this process; BOUGH_WORKER_KEY_FILE must have the same key on "
                "all machines"
            )

    def is_shown(self, authorization: Iterable[str | bytes]) -> bool:
        """Whether a call has one of the keys; in constant time."""
        shown, is_known = hash_of(key_in(authorization)), False
        for secret in self.file.value:
            is_known |= hmac.compare_digest(hash_of(secret), shown)
        return is_known


def read_secrets(where: str, text: str) -> tuple[str, ...]:
    """Parse the keys of a file. Raises ConfigError, without them."""
    secrets = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not secrets or min(map(len, secrets)) < LEAST_LENGTH:
        raise ConfigError(
            f"{where}: must have one key per line, each of {LEAST_LENGTH} to {MAX_KEY_LENGTH} characters, such as "
            "`openssl rand -hex 32` makes"
        )
    return tuple(require_key(where, secret) for secret in secrets)
