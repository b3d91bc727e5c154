"""The default memory budget of a worker's KV cache, and the longest context that it holds."""

from __future__ import annotations

MOST_BYTES = 2 * 1000**3
NUM_SESSIONS = 32  # sessions of the longest context
SHARE = 0.125  # of a worker's memory; the rest is for weights
LEAST_CONTEXT = 2048  # tokens of a session for which there is room by default, however little memory there is
STEP = 256  # tokens by which a context that follows from memory is rounded down


def kv_budget(session_bytes: int, memory_bytes: int, least_bytes: int | None = None) -> int:
    """Bytes for the KV cache out of `memory_bytes` for everything, at least `least_bytes`, by default one session.

    It is MOST_BYTES at most, or what one session takes.
    """
    least = session_bytes if least_bytes is None else least_bytes
    return max(least, min(max(MOST_BYTES, session_bytes), NUM_SESSIONS * session_bytes, int(memory_bytes * SHARE)))


def context_within(kv_memory: int, row_bytes: int, state_bytes: int, num_tree: int, most: int) -> int:
    """Tokens of the longest session, `most` at most, that fits `kv_memory` together with `num_tree` rows of a tree.

    Where sessions have states, half of the memory is left to those of further sessions.
    """
    rows = (kv_memory // (2 if state_bytes else 1) - state_bytes) // row_bytes - num_tree
    return max(1, min(most, rows - rows % STEP if rows > STEP else rows))


def num_states(kv_memory: int, longest: int, state_bytes: int) -> int:
    """Sessions whose states, of `state_bytes` each, fit beside rows; 0 if sessions have none.

    There is room for a quarter of the rows of the longest session for each, and for all of them, `longest` bytes, of
    one.
    """
    if not state_bytes:
        return 0
    return max(1, min((kv_memory - longest) // state_bytes, kv_memory // (longest // 4 + state_bytes)))
