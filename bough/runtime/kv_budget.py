"""The default memory budget of a worker's KV cache, and the longest context that fits."""

from __future__ import annotations

MOST_BYTES = 2 * 1000**3
NUM_SESSIONS = 32  # sessions of the longest context
SHARE = 0.125  # of a worker's memory; the rest is for weights
LEAST_CONTEXT = 2048  # minimum tokens of a session by default, even with little memory
STEP = 256  # a context derived from memory is rounded down to a multiple of so many tokens


def kv_budget(session_bytes: int, memory_bytes: int, least_bytes: int | None = None) -> int:
    """Bytes for the KV cache out of `memory_bytes` for everything, at least `least_bytes`, by default one session.

    It is MOST_BYTES at most, or what one session takes.
    """
    least = session_bytes if least_bytes is None else least_bytes
    return max(least, min(max(MOST_BYTES, session_bytes), NUM_SESSIONS * session_bytes, int(memory_bytes * SHARE)))


def context_within(kv_memory: int, row_bytes: int, state_bytes: int, num_tree: int, most: int) -> int:
    """Tokens of the longest session, `most` at most, that fits `kv_memory` together with `num_tree` rows of a tree.

    If sessions have recurrent states, half of the memory is reserved for those of further sessions.
    """
    rows = (kv_memory // (2 if state_bytes else 1) - state_bytes) // row_bytes - num_tree
    return max(1, min(most, rows - rows % STEP if rows > STEP else rows))


def num_states(kv_memory: int, longest: int, state_bytes: int) -> int:
    """Sessions whose states, of `state_bytes` each, fit together with rows; 0 if sessions have no states.

    Each session gets memory for a quarter of the rows of the longest session, and one session for all its rows, which
    are `longest` bytes.
    """
    if not state_bytes:
        return 0
    return max(1, min((kv_memory - longest) // state_bytes, kv_memory // (longest // 4 + state_bytes)))
