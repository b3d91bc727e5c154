"""A sweep's logits stay on the device: a verdict reads only the few rows on its walk."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bough.model.faults import named_faults
from bough.model.sampling.sampler import Row

NO_NUMBER = -1  # in place of a token, where a row's largest logit is not finite


def best_tokens(logits: torch.Tensor) -> torch.Tensor:
    """Argmax of each row, (num_rows,) int64 on the host; NO_NUMBER where the largest logit is not finite.

    The result is a few kilobytes where logits are hundreds of megabytes. This is the one wait for a device's sweep.
    """
    largest, tokens = logits.max(-1)
    return torch.where(largest.isfinite(), tokens, NO_NUMBER).cpu()


class RowReader:
    """Copies rows of logits to the host one at a time, through one buffer, pinned for a GPU."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None  # (vocab_size,), dtype of the logits

    def read(self, row: torch.Tensor) -> Row:
        """Row (vocab_size,) as float64 on the host. Raises AcceleratorFull or AcceleratorLost."""
        if row.device.type == "cpu":
            return row.double().numpy()
        with named_faults(row.device):
            if self._buffer is None:
                self._buffer = torch.empty(row.shape, dtype=row.dtype, pin_memory=row.device.type == "cuda")
            return self._buffer.copy_(row).double().numpy()


class LogitRows:
    """The logit rows of one tree, one for each node; valid until the next sweep."""

    def __init__(self, rows: torch.Tensor, best: torch.Tensor | None, reader: RowReader) -> None:
        """`rows` is (num_nodes, vocab_size); `best` is `best_tokens` of these, or None for logits on the host."""
        self._rows, self._best, self._reader = rows, best, reader

    def after(self, path: Sequence[int]) -> Row:
        """Logits (vocab_size,) after a path of nodes."""
        return self._reader.read(self._rows[path[-1]])

    def best_after(self, path: Sequence[int]) -> int | None:
        """The token with the largest logit after a path of nodes, or NO_NUMBER; None if logits are on the host."""
        return None if self._best is None else int(self._best[path[-1]])
