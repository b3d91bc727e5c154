"""The places of a batch's keys and values, as arrays for compiled code."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from bough.model.batch.state_steps import StateSteps, chain_steps, tree_steps
from bough.model.kv.session_kv import KVSlot
from bough.model.kv.slot import Segment

SPAN_ROWS = 16  # rows that attend together, which fills all SIMD lanes for any number of heads
IntArray = NDArray[np.int32]
TILE_ROWS = 16  # rows of one slot that may attend together
PART_KEYS = 1024  # positions of a part of the keys, which GPUs compute apart
PARTIAL_BYTES = 2**26  # of parts' results until they are folded


class BatchPart:
    """A segment's rows within a chunk, in the form that attention needs; made once for all layers."""

    def __init__(self, begin: int, segment: Segment) -> None:
        assert isinstance(segment.slot, KVSlot), "there are keys to be read"
        self.slot = segment.slot
        self.span = slice(begin, begin + len(segment))  # rows within the chunk
        self.rows = segment.rows.astype(np.int64)
        self.num_keys = int(max(segment.rows.max(), segment.positions.max())) + 1  # slot rows that may be read
        self.base = segment.base
        self.tail = np.ascontiguousarray(segment.tail)
        self.lengths = segment.positions + np.int32(1)  # number of keys on each row's path
        self._tree_steps: StateSteps | None = None
        self._chain_steps: dict[int, StateSteps] = {}  # by number of rows

    @property
    def is_tree(self) -> bool:
        """Whether the rows are nodes of a tree, not of a text."""
        return bool(self.tail.shape[1])

    def tree_steps(self, width: int) -> StateSteps:
        """Steps of recurrent layers along the tree; the same for all layers, as their convolutions are equally wide."""
        if self._tree_steps is None:
            self._tree_steps = tree_steps(self.tail - self.base, self.lengths - 1 - self.base, width)
        return self._tree_steps

    def chain_steps(self, num_rows: int, width: int) -> StateSteps:
        """Steps over consecutive rows: some of the piece's, after rows that were accepted earlier."""
        if num_rows not in self._chain_steps:
            self._chain_steps[num_rows] = chain_steps(num_rows, width)
        return self._chain_steps[num_rows]


class Place(NamedTuple):
    """Memory of keys and values of successive layers."""

    keys: int  # address
    values: int
    layer_rows: int  # rows from one layer to the next


class PathSpans(NamedTuple):
    """All pieces of a chunk."""

    slots: NDArray[np.int64]  # (num_pieces, 3) `Place` of each piece
    ranges: NDArray[np.int64]  # (num_pieces, 6) first row, end, base, start of its tail, width of the tail, num_keys
    tasks: NDArray[np.int64]  # (num_tasks, 4) piece, first row, end, KV head: rows that attend together
    rows: NDArray[np.int64]  # (num_rows,) slot rows where keys and values are written
    lengths: NDArray[np.int32]  # (num_rows,) number of keys on each row's path
    tails: NDArray[np.int32]  # all pieces' tails, flattened

    @classmethod
    def of(cls, pieces: Sequence[BatchPart]) -> PathSpans:
        """Spans of pieces that attend in their own slots; the pieces must outlive them."""
        slots = [piece.slot for piece in pieces]
        places = [Place(slot.keys.data_ptr(), slot.values.data_ptr(), slot.layer_rows) for slot in slots]
        return cls.at(places, pieces, slots[0].keys.shape[2])

    @classmethod
    def at(cls, places: Sequence[Place], pieces: Sequence[BatchPart], num_kv_heads: int) -> PathSpans:
        """Spans of pieces whose keys and values are elsewhere. The pieces' rows follow one another from row 0."""
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
    """Tasks for each KV head of row ranges that attend together, cut where a thread's share ends.

    Tasks are ordered by piece, as its heads' keys are neighbours, and then by head, to keep a head's keys cached.
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


class Paths(NamedTuple):
    """Every row's path, in rows of the memory that contains all slots of a chunk.

    The key at position p is in row origin + p if p < base, otherwise in the row that the tail gives.
    """

    rows: torch.Tensor  # (num_rows,) int64: where the rows' own keys and values are written
    origins: torch.Tensor  # (num_rows,) int32: where the slots begin
    bases: torch.Tensor  # (num_rows,) int32
    lengths: torch.Tensor  # (num_rows,) int32: number of keys on each row's path
    tails: torch.Tensor  # (num_rows, width) int32: [i, j] is for position bases[i] + j; arbitrary beyond the path
    tiles: torch.Tensor  # (num_tiles, 2) int32: first row and end of at most TILE_ROWS rows of one piece
    longest: int = 0  # most keys of a row; 0 if the host does not know, as in captured steps

    @classmethod
    def of(cls, pieces: Sequence[BatchPart], begins: Sequence[int]) -> Paths:
        """Paths of all rows of pieces whose slots begin at these rows of one memory, on the host."""
        sizes = [len(piece.lengths) for piece in pieces]
        tails = np.zeros((sum(sizes), max(piece.tail.shape[1] for piece in pieces)), np.int32)
        first = 0
        for piece, begin, size in zip(pieces, begins, sizes, strict=True):
            tails[first : first + size, : piece.tail.shape[1]] = begin + piece.tail
            first += size
        origins, lengths = np.repeat(np.array(begins, np.int32), sizes), np.concatenate([x.lengths for x in pieces])
        arrays = (
            origins + np.concatenate([piece.rows for piece in pieces]),
            origins,
            np.repeat(np.array([piece.base for piece in pieces], np.int32), sizes),
            lengths,
            tails,
            tiles_of(sizes),
        )
        return cls._make([*map(torch.from_numpy, arrays), int(lengths.max())])

    def on(self, device: torch.device) -> Paths:
        """A copy of the arrays on a device."""
        return Paths._make([*(numbers.to(device) for numbers in self[:-1]), self.longest])


def num_parts(longest: int, part_keys: int, window: int) -> tuple[int, int]:
    """Number of parts of the keys, and of those that a row sees at most; one if the longest row is not known."""
    parts = max(1, -(-longest // part_keys))
    return parts, min(parts, (window - 2) // part_keys + 2) if window else parts


def tile_bytes(num_heads: int, head_dim: int, parts: int) -> int:
    """Bytes of the results of a tile's parts in float32, each with its highest score and total."""
    return 4 * TILE_ROWS * num_heads * parts * (head_dim + 2)


def tiles_of(sizes: Sequence[int]) -> IntArray:
    """Tiles (num_tiles, 2) of pieces that follow one another from row 0."""
    ends = np.cumsum(sizes)
    pairs = [
        (row, min(row + TILE_ROWS, end))
        for begin, end in zip(ends - sizes, ends, strict=True)
        for row in range(begin, end, TILE_ROWS)
    ]
    return np.array(pairs, np.int32).reshape(-1, 2)
