"""Ids of sessions and requests, as a value and as text."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote, unquote

SEPARATOR = "::"  # in an id's text, after the tenant


@dataclass(frozen=True, slots=True, order=True)
class ScopedId:
    """The id of a session or request: the name that its client gave it, and the client's tenant.

    Ids of different tenants are never equal. An id without a name is false, and stands for none.
    """

    name: str = ""
    tenant: str = ""  # empty if there are no keys

    def __bool__(self) -> bool:
        return bool(self.name)

    def __str__(self) -> str:
        """NAME or TENANT::NAME: the id on the wire, in the index and in logs. Different ids have different texts."""
        if not self.tenant and SEPARATOR not in self.name:
            return self.name
        return f"{quote(self.tenant, safe='')}{SEPARATOR}{self.name}"

    @classmethod
    def parse(cls, text: str) -> ScopedId:
        """The id with this text."""
        tenant, separator, name = text.partition(SEPARATOR)
        return cls(name, unquote(tenant)) if separator else cls(text)
