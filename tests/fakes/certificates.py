"""Authorities and certificates for tests of TLS: those that load tests make."""

from __future__ import annotations

from loadtest.common.certificates import HERE, Authority, Pair, flags_of

__all__ = ["HERE", "Authority", "Pair", "flags_of"]
