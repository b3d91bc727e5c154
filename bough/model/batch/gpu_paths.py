"""Where the rows of a batch have their keys and values, as arrays on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from bough.model.batch.batch import BatchPart


IntArray = NDArray[np.int32]
TILE_ROWS = 16  # rows of one slot that may attend together


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

    @classmethod
    def of(cls, pieces: Sequence[BatchPart], begins: Sequence[int]) -> Paths:
        """Paths of all rows of pieces whose slots begin at these rows of one memory, on the host."""
        sizes = [len(piece.lengths) for piece in pieces]
        tails = np.zeros((sum(sizes), max(piece.tail.shape[1] for piece in pieces)), np.int32)
        first = 0
        for piece, begin, size in zip(pieces, begins, sizes, strict=True):
            tails[first : first + size, : piece.tail.shape[1]] = begin + piece.tail
            first += size
        origins = np.repeat(np.array(begins, np.int32), sizes)
        arrays = (
            origins + np.concatenate([piece.rows for piece in pieces]),
            origins,
            np.repeat(np.array([piece.base for piece in pieces], np.int32), sizes),
            np.concatenate([piece.lengths for piece in pieces]),
            tails,
            tiles_of(sizes),
        )
        return cls(*map(torch.from_numpy, arrays))

    def on(self, device: torch.device) -> Paths:
        """A copy of the arrays on a device."""
        return Paths(*(numbers.to(device) for numbers in self))


def tiles_of(sizes: Sequence[int]) -> IntArray:
    """Tiles (num_tiles, 2) of pieces that follow one another from row 0."""
    ends = np.cumsum(sizes)
    pairs = [
        (row, min(row + TILE_ROWS, end))
        for begin, end in zip(ends - sizes, ends, strict=True)
        for row in range(begin, end, TILE_ROWS)
    ]
    return np.array(pairs, np.int32).reshape(-1, 2)
