"""Keys in calls: `authorization: Bearer KEY`, as HTTP header or gRPC metadata."""

from __future__ import annotations

from collections.abc import Iterable

from bough.errors import ConfigError, Unauthenticated

HEADER = "authorization"
MAX_KEY_LENGTH = 512
_SCHEME = "bearer"


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
        "authorization: must be Bearer and a key that is valid here; bough's own client and commands take BOUGH_API_KEY"
    )
