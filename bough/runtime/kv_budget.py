"""How much memory keys and values get of a worker that is not told. Sizes in, sizes out."""

from __future__ import annotations

MOST_BYTES = 2 * 1000**3
NUM_SESSIONS = 32  # of the longest context; most are shorter, and what is never held is never taken
SHARE = 0.125  # of the memory that a worker may take: the rest is for weights


def kv_budget(session_bytes: int, memory_bytes: int) -> int:
    """Bytes for keys and values, at least those of one session; `memory_bytes` are what there is for everything."""
    return max(session_bytes, min(MOST_BYTES, NUM_SESSIONS * session_bytes, int(memory_bytes * SHARE)))
