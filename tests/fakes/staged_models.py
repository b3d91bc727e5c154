"""A model whose layers are those of several stages, which pass frames to one another without a network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from bough.model.architecture.architecture import load_config
from bough.model.batch.batch import Batch
from bough.model.kv.session_kv import KVArena
from target_worker.stages.frames import Frame
from target_worker.stages.pass_codec import pass_from_wire, pass_to_wire
from target_worker.stages.passes import StagePass
from target_worker.stages.slots import LoggedSlot, MirroredSlots, SlotLog
from target_worker.stages.stage import Stage
from target_worker.sweep.streamed_model import StageLayers, StreamedModel
from tests.fakes.models import CPU, streamed


class StagedModel:
    """The head of several stages, and the arena of its slots."""

    def __init__(self, head: StreamedModel, stages: Sequence[Stage], num_rows: int, most_slots: int) -> None:
        self.model, self.rows, self.stages, self.log = head, head.rows, stages, SlotLog()
        shape = head.skeleton.kv_shape()
        kind = partial(LoggedSlot, self.log)
        self.arena = KVArena(shape, shape.empty(num_rows, CPU), most_slots=most_slots, kind=kind)
        self.num_bytes: list[int] = []  # of each body

    def sweep(self, batch: Batch) -> tuple[torch.Tensor]:
        """As `StreamedModel.sweep`, through all stages."""
        hidden, _ = self.model.run_layers(batch)
        header, body = pass_to_wire(StagePass.of(self.log.take(), batch, hidden))
        for stage in self.stages:
            self.num_bytes.append(len(body))
            header, body = stage.run(header, bytes(body))
        return (self.model.logits_of(batch, pass_from_wire(header, body).padded(batch)),)


class RingInProcess:
    """A ring whose stages are in this process; it has one epoch."""

    epoch, why_down = 1, ""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages

    def send(self, epoch: int, frame: Frame) -> None:
        for stage in self._stages:
            frame = Frame(*stage.run(frame.header, bytes(frame.body)))
        self._frame = frame

    def receiving(self, epoch: int, timeout_seconds: float) -> Future[Frame]:
        future = Future[Frame]()
        future.set_result(self._frame)
        return future


@contextmanager
def staged(
    folder: Path, dtype: torch.dtype, cuts: Sequence[int], num_rows: int = 800, most_slots: int = 0, rows: int = 16
) -> Iterator[StagedModel]:
    """The head's model and further stages; `cuts` are the first layers of these."""
    total = int(load_config(folder).num_hidden_layers)
    with ExitStack() as stack:
        models = [
            stack.enter_context(streamed(folder, dtype, rows, stage=StageLayers(first, end, total)))
            for first, end in pairwise((0, *cuts, total))
        ]
        shapes = [model.skeleton.kv_shape() for model in models[1:]]
        slots = [MirroredSlots(shape, shape.empty(num_rows, CPU)) for shape in shapes]
        stages = [Stage(*each, num_rows) for each in zip(models[1:], slots, strict=True)]
        yield StagedModel(models[0], stages, num_rows, most_slots)
