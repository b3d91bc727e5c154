"""What the keys of the index are called."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from bough.errors import ConfigError, InvalidRequest


class Kind(Enum):
    """What clients make entries of."""

    SESSION = "session"
    REQUEST = "request"


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a namespace, which all have it as their hash tag: in a cluster one node has them all."""

    namespace: str

    def validate(self) -> None:
        """Raises ConfigError."""
        name = self.namespace
        if not name or set(name) & set("{}") or not is_text(name):
            raise ConfigError(f"namespace: value was {name!r}; must be text without braces, and not empty")

    @property
    def leases(self) -> str:
        return self._key("workers:leases")

    @property
    def registry(self) -> list[str]:
        """Leases and records of workers."""
        return [self.leases, self._key("workers:records")]

    @property
    def looked(self) -> str:
        """When somebody last looked who is there."""
        return self._key("workers:looked")

    def prefixes(self, worker_id: str) -> str:
        """What a worker holds."""
        return self._key(f"prefixes:{require_text('worker_id', worker_id)}")

    def ledger(self, kind: Kind) -> list[str]:
        """How many entries of a kind there are, and how large they are."""
        return [self._key(f"{kind.value}s:ends"), self._key(f"{kind.value}s:bytes")]

    def entry(self, kind: Kind, name: str) -> list[str]:
        """Record and tokens of a session or a request. Raises InvalidRequest for what no key can be named by."""
        name = require_text(f"{kind.value}_id", name)
        return [self._key(f"{kind.value}:{name}"), self._key(f"{kind.value}-tokens:{name}")]

    def listed(self, kind: Kind, name: bytes) -> list[bytes]:
        """The same, of a name as it stands in the ledger."""
        return [key.encode() + name for key in self.entry(kind, "")]

    def _key(self, name: str) -> str:
        return f"{{{self.namespace}}}:{name}"


def is_text(text: str) -> bool:
    """Whether it can be written anywhere. Halves of surrogate pairs, which JSON and file names may hold, cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def require_text(field: str, text: str) -> str:
    """The text itself. Raises InvalidRequest for one with half of a surrogate pair."""
    if not is_text(text):
        raise InvalidRequest(f"{field}: value was {text!r}; must be text without halves of surrogate pairs")
    return text
