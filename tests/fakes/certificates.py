"""Certificate authorities and certificates for tests of TLS, from the load tests' module."""

from __future__ import annotations

from loadtest.common.certificates import HERE, Authority, Pair, flags_of

__all__ = ["HERE", "Authority", "Pair", "flags_of"]
