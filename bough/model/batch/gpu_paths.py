"""Where the rows of a batch have their keys and values, as arrays on an accelerator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from bough.model.batch.batch import BatchPart


IntArray = NDArray[np.int32]
TILE_ROWS = 16  # of one slot, that may attend together


class Paths(NamedTuple):
    """Every row's path, in rows of the memory that all slots of a chunk are in.

    The key at position p stands in row origin + p where p < base, else where the tail says.
    """

    rows: torch.Tensor  # (num_rows,) int64: take the rows' own keys and values
    origins: torch.Tensor  # (num_rows,) int32: where the slots begin
    bases: torch.Tensor  # (num_rows,) int32
    lengths: torch.Tensor  # (num_rows,) int32: keys on each row's path
    tails: torch.Tensor  # (num_rows, width) int32: [i, j] is for position bases[i] + j; beyond the path anything
    tiles: torch.Tensor  # (num_tiles, 2) int32: first row and end of rows of one piece, TILE_ROWS of them at most


class PathArrays(NamedTuple):
    """The same before it is on a device: int32 throughout."""

    rows: IntArray
    origins: IntArray
    bases: IntArray
    lengths: IntArray
    tails: IntArray
    tiles: IntArray

    @classmethod
    def of(cls, pieces: Sequence[BatchPart], begins: Sequence[int]) -> PathArrays:
        """Of all rows of some pieces, whose slots begin at these rows of one memory."""
        sizes = [len(piece.lengths) for piece in pieces]
        tails = np.zeros((sum(sizes), max(piece.tail.shape[1] for piece in pieces)), np.int32)
        first = 0
        for piece, begin, size in zip(pieces, begins, sizes, strict=True):
            tails[first : first + size, : piece.tail.shape[1]] = begin + piece.tail
            first += size
        origins = np.repeat(np.array(begins, np.int32), sizes)
        return cls(
            origins + np.concatenate([piece.rows for piece in pieces]).astype(np.int32),
            origins,
            np.repeat(np.array([piece.base for piece in pieces], np.int32), sizes),
            np.concatenate([piece.lengths for piece in pieces]),
            tails,
            _tiles(sizes),
        )

    def on(self, device: torch.device) -> Paths:
        """As attention takes them."""
        rows, *others = (torch.from_numpy(array).to(device) for array in self)
        return Paths(rows.long(), *others)


def _tiles(sizes: Sequence[int]) -> IntArray:
    """Of pieces that follow one another from row 0."""
    ends = np.cumsum(sizes)
    pairs = [
        (row, min(row + TILE_ROWS, end))
        for begin, end in zip(ends - sizes, ends, strict=True)
        for row in range(begin, end, TILE_ROWS)
    ]
    return np.array(pairs, np.int32)
