"""A stage's part of a pass."""

from __future__ import annotations

from dataclasses import replace

import torch

from bough.errors import AcceleratorFull, InvalidRequest
from bough.model.batch.batch import Batch
from bough.model.kv.slot import Segment
from bough.trees.tree import Tree
from target_worker.stages.pass_codec import pass_from_wire, pass_to_wire
from target_worker.stages.passes import NAMES, StagePass
from target_worker.stages.slots import MirroredSlots
from target_worker.sweep.streamed_model import StreamedModel


class Stage:
    """Consecutive layers, and the slots of their KV; one thread's own."""

    def __init__(self, model: StreamedModel, slots: MirroredSlots, most_rows: int) -> None:
        """`most_rows` is the limit of a pass, for which there is memory."""
        self.slots = slots
        self._model, self._most_rows = model, most_rows

    def run(self, header: bytes, body: bytes | memoryview, queue_ns: int = 0) -> tuple[bytes, bytes | memoryview]:
        """The header and body for the next member; without memory for the rows, they say so.

        `queue_ns` is the time that the pass has waited here for the one before it.

        Raises:
            InvalidRequest: names the field that does not fit what the stage holds.
            BoughError: as `StreamedModel.run_layers`.
        """
        given = pass_from_wire(header, body)
        self._require_form(given)
        for change in given.changes:
            self.slots.apply(change)
        if given.full:
            return header, body
        self._require_positions(given)
        batch = Batch([rows.segment(self.slots) for rows in given.rows], self._model.rows, self._model.device)
        try:
            hidden, timings = self._model.run_layers(batch, given.padded(batch))
            return pass_to_wire(given.after(batch, hidden, replace(timings, queue_ns=queue_ns)))
        except AcceleratorFull as exc:
            return pass_to_wire(given._replace(full=str(exc)))

    def warm_up(self) -> None:
        """Run the layers on one row, which compiles and allocates."""
        slot = self.slots.spare_slot()
        batch = Batch([Segment.tree(slot, 0, Tree.root(0))], self._model.rows, self._model.device)
        width = int(self._model.skeleton.config.hidden_size)
        self._model.run_layers(batch, torch.zeros((1, batch.num_rows, width), dtype=self._model.given_dtype))

    def _require_form(self, given: StagePass) -> None:
        hidden, model = given.hidden, self._model
        if hidden.dtype != model.given_dtype:
            raise InvalidRequest("dtype", f"must be {NAMES[model.given_dtype]}", NAMES[hidden.dtype])
        if hidden.shape[1] != (width := int(model.skeleton.config.hidden_size)):
            raise InvalidRequest("width", f"must be {width}", hidden.shape[1])
        if not given.rows:
            raise InvalidRequest("rows", "must be at least one", "none")
        if (num_rows := sum(rows.num_rows for rows in given.rows)) > self._most_rows:
            raise InvalidRequest("rows", f"must be at most {self._most_rows} in all", num_rows)

    def _require_positions(self, given: StagePass) -> None:
        """Each slot's rows follow what is committed there: otherwise head and stage hold different rows."""
        ends: dict[int, int] = {}
        for rows in given.rows:
            end = ends.get(rows.slot, self.slots.slot(rows.slot).length)
            if rows.base != end:
                raise InvalidRequest("rows.base", f"must be {end}, after the rows of slot {rows.slot}", rows.base)
            ends[rows.slot] = end + rows.num_rows
