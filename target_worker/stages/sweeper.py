"""Sweeps of a head, whose rows go through the other stages."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from bough.grammar.allowed_tokens import Grammars
from bough.telemetry.spans import FinishedSpan
from target_worker.scheduler.batching import Part
from target_worker.scheduler.job import SweepInFlight, Swept, VerifyJob
from target_worker.stages.remote import OtherStages
from target_worker.sweep.streamed_model import StreamedModel, StreamedSweeper


class StagedSweeper(StreamedSweeper):
    """Computes the head's own layers, and the logits when the rows are back from the last stage."""

    def __init__(
        self,
        model: StreamedModel,
        grammars: Grammars,
        others: OtherStages,
        spans: Callable[[], Sequence[FinishedSpan]] = tuple,
    ) -> None:
        """`spans` returns parts of the last sweep for traces."""
        super().__init__(model, grammars)
        self._others, self._spans = others, spans

    def sweep(self, parts: Sequence[Part[VerifyJob]]) -> Swept | SweepInFlight:
        began_ns, batch = time.perf_counter_ns(), self._batch_of(parts)
        hidden, timings = self._model.run_layers(batch)
        kv_bytes, sent = self._model.kv_bytes, self._others.send(batch, hidden)

        def finish() -> Swept:
            logits = self._model.logits_of(batch, self._others.receive(sent))
            total_ns = time.perf_counter_ns() - began_ns
            whole = replace(timings, total_ns=total_ns, compute_ns=total_ns - timings.wait_ns)
            return self._swept(parts, logits, whole, kv_bytes)._replace(spans=self._spans())

        return SweepInFlight(sent.arrived, finish)
