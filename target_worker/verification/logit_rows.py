"""A sweep's logits, which stay where they were computed: of hundreds of rows a verdict looks at the few on its walk."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bough.model.sampling.sampler import Row

NO_NUMBER = -1  # in place of a token, where no logit of a row is the largest finite one


def best_tokens(logits: torch.Tensor) -> torch.Tensor:
    """(num_rows,) int64 on the host: the first of each row's largest logits; NO_NUMBER where that is not finite.

    A few kilobytes of a sweep's hundreds of megabytes, and the one place that waits for an accelerator's sweep.
    """
    largest, tokens = logits.max(-1)
    return torch.where(largest.isfinite(), tokens, NO_NUMBER).cpu()


class RowReader:
    """Brings rows of logits to the host, one at a time, through one buffer, which of a GPU's is pinned."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None  # (vocab_size,), as the logits

    def read(self, row: torch.Tensor) -> Row:
        """(vocab_size,) float64 of a row wherever it is."""
        if row.device.type == "cpu":
            return row.double().numpy()
        if self._buffer is None:
            self._buffer = torch.empty(row.shape, dtype=row.dtype, pin_memory=row.device.type == "cuda")
        return self._buffer.copy_(row).double().numpy()


class LogitRows:
    """Of one tree, a row a node; valid until the next sweep."""

    def __init__(self, rows: torch.Tensor, best: torch.Tensor | None, reader: RowReader) -> None:
        """`rows` (num_nodes, vocab_size); `best` as `best_tokens` gives them, None where rows are at hand anyway."""
        self._rows, self._best, self._reader = rows, best, reader

    def after(self, path: Sequence[int]) -> Row:
        """(vocab_size,) logits after a path of nodes."""
        return self._reader.read(self._rows[path[-1]])

    def best_after(self, path: Sequence[int]) -> int | None:
        """As `best_tokens` after a path of nodes; None where that was not asked of the device."""
        return None if self._best is None else int(self._best[path[-1]])
