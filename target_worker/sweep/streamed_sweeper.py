"""A streamed model as the engine's sweeper: parts become one packed batch, and its logits verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from bough.model.batch.batch import Batch
from bough.model.kv.slot import Slot
from bough.protocol.messages import Verdict
from bough.sizing.row_counts import RowCounts
from bough.sizing.sweep_times import SweepPrior
from target_worker.scheduler.batching import Part
from target_worker.scheduler.job import VerifyJob
from target_worker.scheduler.sweep_figures import SweepFigures
from target_worker.scheduler.sweeper import Swept
from target_worker.verification.logit_rows import LogitRows, RowReader
from target_worker.verification.verdict import compute_verdict


class SweepModel(Protocol):
    """What runs packed batches: a streamed model, or a fake."""

    rows: RowCounts
    device: torch.device

    def sweep(self, batch: Batch) -> tuple[torch.Tensor, SweepFigures]:
        """(num_logit_rows, vocab_size) logits where they were computed, until the next sweep; and where time went."""
        ...

    @property
    def best(self) -> torch.Tensor | None:
        """Of the last sweep's logits, as `best_tokens`, where they are not the host's."""
        ...

    def warm_up(self, slot: Slot) -> SweepPrior | None:
        """As a sweeper's."""
        ...


class StreamedSweeper:
    """Sweeps with a model and judges by its logits."""

    def __init__(self, model: SweepModel) -> None:
        self._model, self._reader = model, RowReader()
        self.rows = model.rows

    def sweep(self, parts: Sequence[Part[VerifyJob]]) -> Swept:
        """One batch of all parts."""
        segments = [segment for part in parts for segment in part.job.segments(part.num_context, part.has_tree)]
        logits, figures = self._model.sweep(Batch(segments, self._model.rows, self._model.device))
        own = self._by_job([part.job for part in parts if part.has_tree], logits)

        def verdict_on(job: VerifyJob) -> Verdict:
            call, rows = replace(job.call, tree=job.tree), own[id(job)]
            return compute_verdict(call, job.text.tokens, rows.after, rows.best_after)

        return Swept(figures, verdict_on)

    def _by_job(self, jobs: Sequence[VerifyJob], logits: torch.Tensor) -> dict[int, LogitRows]:
        """Each job's rows, which follow one another, by its `id`."""
        sizes, best = [job.num_nodes for job in jobs], self._model.best
        own_best = torch.split(best, sizes) if best is not None else [None] * len(jobs)
        pairs = zip(torch.split(logits, sizes), own_best, strict=True)
        return {id(job): LogitRows(*pair, self._reader) for job, pair in zip(jobs, pairs, strict=True)}

    def warm_up(self, slot: Slot) -> SweepPrior | None:
        """Passes rows through the model for nobody."""
        return self._model.warm_up(slot)
