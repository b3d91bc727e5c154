"""What a stage gets for its part of a sweep, and how that is written to a frame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from bough.errors import InvalidRequest
from bough.model.batch.batch import Batch
from bough.model.kv.slot import Segment
from bough.model.loading.loading import DTYPES
from bough.protocol.messages import Timings
from bough.trees.tree import IntArray, Tree
from target_worker.stages.slots import LoggedSlot, MirroredSlots, SlotChange

NAMES = {dtype: name for name, dtype in DTYPES.items()}


class PassRows(NamedTuple):
    """Rows of one slot: consecutive tokens, or a tree."""

    slot: int
    base: int  # position of the first
    num_tokens: int  # without a tree
    parents: tuple[int, ...]  # of a tree's nodes, -1 at the root; empty without a tree

    @classmethod
    def of(cls, segment: Segment) -> PassRows:
        """The rows of a segment of the head's batch."""
        assert isinstance(segment.slot, LoggedSlot), "the head of several stages has such slots"
        slot, width = segment.slot.number, segment.tail.shape[1]
        if not width:
            return cls(slot, int(segment.positions[0]), len(segment), ())
        return cls(slot, segment.base, 0, tuple(_parents(segment).tolist()))

    @property
    def num_rows(self) -> int:
        return len(self.parents) or self.num_tokens

    def segment(self, slots: MirroredSlots) -> Segment:
        """The rows as a segment of a stage's batch. Raises InvalidRequest, which names what is wrong."""
        num_rows = self.num_rows
        if num_rows < 1:
            raise InvalidRequest("rows.num_tokens", "must be at least 1 without a tree", num_rows)
        slot = slots.slot(self.slot, self.base + num_rows)
        if not self.parents:
            return Segment.context(slot, self.base, [0] * num_rows)
        tree = Tree.of(range(num_rows), self.parents, [0.0] * num_rows)
        tree.validate(num_rows, num_rows)
        return Segment.tree(slot, self.base, tree)


def _parents(segment: Segment) -> IntArray:
    """The parent of each node of a tree's segment: its path's last row but one."""
    depths = segment.positions - segment.base
    before = segment.tail[np.arange(len(segment)), np.maximum(depths - 1, 0)] - segment.base
    return np.where(depths > 0, before, -1).astype(np.int32)


class StagePass(NamedTuple):
    """A pass on its way through the stages."""

    changes: Sequence[SlotChange]  # of slots, since the last pass
    rows: Sequence[PassRows]
    hidden: torch.Tensor  # (num_rows, width) on the host
    timings: tuple[Timings, ...] = ()  # of the stages that have computed, in order
    full: str = ""  # why the next one had no memory for these rows; the others then only repeat the changes

    @classmethod
    def of(cls, changes: Sequence[SlotChange], batch: Batch, hidden: torch.Tensor) -> StagePass:
        """The pass of a batch, whose rows (1, num_rows, width) on the host end with padding."""
        return cls(changes, [*map(PassRows.of, batch.segments)], _unpadded(hidden, batch))

    def after(self, batch: Batch, hidden: torch.Tensor, timings: Timings) -> StagePass:
        """The pass after a stage's layers."""
        return self._replace(hidden=_unpadded(hidden, batch), timings=(*self.timings, timings))

    def padded(self, batch: Batch) -> torch.Tensor:
        """The hidden states with the batch's padding, (1, num_rows, width). Raises InvalidRequest for other rows."""
        num_tokens, width = self.hidden.shape
        if num_tokens != batch.num_tokens:
            raise InvalidRequest("body", f"must be hidden states of {batch.num_tokens} rows", num_tokens)
        out = torch.zeros((1, batch.num_rows, width), dtype=self.hidden.dtype)
        out[0, :num_tokens] = self.hidden
        return out


def _unpadded(hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
    return hidden[0, : batch.num_tokens].contiguous()


def body_of(hidden: torch.Tensor) -> memoryview:
    """The bytes of hidden states on the host."""
    return hidden.view(torch.uint8).numpy().reshape(-1).data


def hidden_of(body: bytes | memoryview, dtype: str, width: int) -> torch.Tensor:
    """Hidden states (num_rows, width) from their bytes. Raises InvalidRequest, which names the field."""
    if dtype not in DTYPES:
        raise InvalidRequest("dtype", f"must be one of {', '.join(DTYPES)}", repr(dtype))
    row_bytes = width * DTYPES[dtype].itemsize
    if not row_bytes or not len(body) or len(body) % row_bytes:
        raise InvalidRequest("body", f"must be rows of {row_bytes} bytes", f"{len(body)} bytes")
    return torch.frombuffer(bytearray(body), dtype=DTYPES[dtype]).view(-1, width)
