"""Implements the engine's Sweeper with a streamed model: parts become one batch, and its logits verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from bough.grammar.allowed_tokens import Grammars
from bough.model.batch.batch import Batch
from bough.model.kv.slot import Slot
from bough.protocol.messages import Verdict
from bough.sizing.sweep_times import SweepPrior
from target_worker.scheduler.batching import Part
from target_worker.scheduler.job import VerifyJob
from target_worker.scheduler.sweeper import Swept
from target_worker.sweep.streamed_model import StreamedModel
from target_worker.verification.logit_rows import LogitRows, RowReader
from target_worker.verification.verdict import compute_verdict


class StreamedSweeper:
    """Sweeps with a model, and gives verdicts from its logits."""

    def __init__(self, model: StreamedModel, grammars: Grammars) -> None:
        self._model, self._grammars, self._reader = model, grammars, RowReader()
        self.rows = model.rows

    def sweep(self, parts: Sequence[Part[VerifyJob]]) -> Swept:
        segments = [segment for part in parts for segment in part.job.segments(part.num_context, part.has_tree)]
        logits, figures = self._model.sweep(Batch(segments, self._model.rows, self._model.device))
        own = self._by_job([part.job for part in parts if part.has_tree], logits)

        def verdict_on(job: VerifyJob) -> Verdict:
            call, rows = replace(job.call, tree=job.tree), own[id(job)]
            grammar, salt = call.sampling.grammar, call.context.cache_salt
            job.session.allowed = allowed = self._grammars.along(grammar, job.session.allowed, salt)
            return compute_verdict(call, job.text.tokens, rows.after, rows.best_after, allowed)

        return Swept(figures, verdict_on)

    def _by_job(self, jobs: Sequence[VerifyJob], logits: torch.Tensor) -> dict[int, LogitRows]:
        """Each job's rows by the job's `id`; rows are in the order of jobs."""
        sizes, best = [job.num_nodes for job in jobs], self._model.best
        own_best = torch.split(best, sizes) if best is not None else [None] * len(jobs)
        pairs = zip(torch.split(logits, sizes), own_best, strict=True)
        return {id(job): LogitRows(*pair, self._reader) for job, pair in zip(jobs, pairs, strict=True)}

    def warm_up(self, slot: Slot) -> SweepPrior | None:
        return self._model.warm_up(slot)
