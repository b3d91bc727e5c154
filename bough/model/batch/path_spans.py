"""Where the rows of a batch have their keys and values, as arrays that compiled code can read."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from bough.model.batch.batch import BatchPart

SPAN_ROWS = 16  # rows that attend together: all lanes are then full, whatever the number of heads


class Place(NamedTuple):
    """Memory of keys and values, of one layer after another."""

    keys: int  # address
    values: int
    layer_rows: int  # from one layer to the next


class PathSpans(NamedTuple):
    """All pieces of a chunk."""

    slots: NDArray[np.int64]  # (num_pieces, 3) a `Place`
    ranges: NDArray[np.int64]  # (num_pieces, 6) first row, end, base, where tails begin, width of the tail, num_keys
    tasks: NDArray[np.int64]  # (num_tasks, 4) a piece, first row, end, KV head: what attends together
    rows: NDArray[np.int64]  # (num_rows,) slot rows that take the keys and values
    lengths: NDArray[np.int32]  # (num_rows,) keys on each row's path
    tails: NDArray[np.int32]  # every piece's tail, flat

    @classmethod
    def of(cls, pieces: Sequence[BatchPart]) -> PathSpans:
        """Of rows that attend in their own slots; the pieces must outlive it."""
        slots = [piece.slot for piece in pieces]
        places = [Place(slot.keys.data_ptr(), slot.values.data_ptr(), slot.layer_rows) for slot in slots]
        return cls.at(places, pieces, slots[0].keys.shape[2])

    @classmethod
    def at(cls, places: Sequence[Place], pieces: Sequence[BatchPart], num_kv_heads: int) -> PathSpans:
        """Of rows whose keys and values are somewhere else. The pieces' rows follow one another from row 0."""
        ranges, together, begin, begin_tail = [], [], 0, 0
        for number, piece in enumerate(pieces):
            end = begin + len(piece.lengths)
            ranges.append((begin, end, piece.base, begin_tail, piece.tail.shape[1], piece.num_keys))
            together += [(number, row, min(row + SPAN_ROWS, end)) for row in range(begin, end, SPAN_ROWS)]
            begin, begin_tail = end, begin_tail + piece.tail.size
        return cls(
            np.array(places, np.int64),
            np.array(ranges, np.int64),
            np.array(_tasks(together, num_kv_heads, numba.get_num_threads()), np.int64),
            np.concatenate([piece.rows for piece in pieces]),
            np.concatenate([piece.lengths for piece in pieces]),
            np.concatenate([piece.tail.ravel() for piece in pieces]),
        )


def _tasks(
    together: Sequence[tuple[int, int, int]], num_kv_heads: int, num_threads: int
) -> list[tuple[int, int, int, int]]:
    """Those of a piece's rows [begin, end) that attend together, for each head; cut where a thread's share ends.

    BatchPart by piece, as its heads' keys are neighbours; there head by head, so that all its rows meet one head's.
    """
    num_rows = num_kv_heads * sum(end - begin for _, begin, end in together)
    share_ends = [num_rows * thread // num_threads for thread in range(1, num_threads)]
    tasks, done = [], 0
    parts = (
        (piece, head, begin, end) for (piece, begin, end), head in itertools.product(together, range(num_kv_heads))
    )
    for piece, head, begin, end in sorted(parts):
        cuts = [begin, *(begin + cut - done for cut in share_ends if 0 < cut - done < end - begin), end]
        tasks += [(piece, *rows, head) for rows in itertools.pairwise(cuts)]
        done += end - begin
    return tasks
