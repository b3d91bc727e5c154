"""The default memory budget of a worker's KV cache."""

from __future__ import annotations

MOST_BYTES = 2 * 1000**3
NUM_SESSIONS = 32  # sessions of the longest context
SHARE = 0.125  # of a worker's memory; the rest is for weights


def kv_budget(session_bytes: int, memory_bytes: int) -> int:
    """Bytes for the KV cache, at least for one session, out of `memory_bytes` for everything."""
    return max(session_bytes, min(MOST_BYTES, NUM_SESSIONS * session_bytes, int(memory_bytes * SHARE)))


def num_states(kv_memory: int, longest: int, state_bytes: int) -> int:
    """Sessions whose states, of `state_bytes` each, fit beside rows; 0 if sessions have none.

    There is room for a quarter of the rows of the longest session for each, and for all of them, `longest` bytes, of
    one.
    """
    if not state_bytes:
        return 0
    return max(1, min((kv_memory - longest) // state_bytes, kv_memory // (longest // 4 + state_bytes)))
