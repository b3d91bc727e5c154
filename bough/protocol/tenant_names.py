"""Whose a session is: inside bough, ids of requests and sessions begin with the name of their tenant."""

from __future__ import annotations

SEPARATOR = "::"  # tenants' names have no colons


def tenant_of(session_id: str) -> str:
    """The tenant of a session; empty if there are no keys."""
    name, separator, _ = session_id.partition(SEPARATOR)
    return name if separator else ""
