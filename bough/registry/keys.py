"""Names of the keys in the index."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from bough.errors import ConfigError
from bough.protocol.codec_checks import require_text


class Kind(Enum):
    """Kinds of entries that clients create."""

    SESSION = "session"
    REQUEST = "request"


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a namespace, which is their hash tag: in a cluster one node has them all."""

    namespace: str

    def validate(self) -> None:
        """Raises ConfigError for an invalid namespace."""
        name = self.namespace
        if not name or set(name) & set("{}") or not name.isprintable():
            raise ConfigError(f"namespace: must be non-empty printable text without braces, got {name!r}")

    @property
    def leases(self) -> str:
        return self._key("workers:leases")

    @property
    def registry(self) -> list[str]:
        """Keys of the leases and records of workers."""
        return [self.leases, self._key("workers:records")]

    @property
    def looked(self) -> str:
        """Key of the time at which workers were last listed."""
        return self._key("workers:looked")

    def prefixes(self, worker_id: str) -> str:
        """Key of the prefixes that a worker has cached."""
        return self._key(f"prefixes:{require_text('worker_id', worker_id)}")

    def ledger(self, kind: Kind) -> list[str]:
        """Keys of the expiry times and sizes of all entries of a kind."""
        return [self._key(f"{kind.value}s:ends"), self._key(f"{kind.value}s:bytes")]

    def entry(self, kind: Kind, name: str) -> list[str]:
        """Keys of the record and tokens of a session or request. Raises InvalidRequest for an invalid name."""
        name = require_text(f"{kind.value}_id", name)
        return [self._key(f"{kind.value}:{name}"), self._key(f"{kind.value}-tokens:{name}")]

    def listed(self, kind: Kind, name: bytes) -> list[bytes]:
        """Keys of the record and tokens of an entry by its name in the ledger."""
        return [key.encode() + name for key in self.entry(kind, "")]

    def _key(self, name: str) -> str:
        return f"{{{self.namespace}}}:{name}"
