"""A target that computes logits only where a verdict needs them, for counting tokens per round."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bough.model.batch.batch import Batch, Segment
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.kv.session_kv import KVSlot
from bough.model.loading.loading import build_skeleton
from bough.model.running.runner import ResidentModel
from bough.model.sampling.sampler import Row
from bough.protocol.messages import Verdict, VerifyCall
from bough.protocol.prefix_hash import prefix_hash
from target_worker.verification.verdict import compute_verdict

REMEMBERED = 3000  # cached rows of logits: with scheme `target` all trees are verified along the same text
CPU = torch.device("cpu")
Judge = Callable[[VerifyCall, list[int], Callable[[Sequence[int]], Row]], Verdict]


class Question(NamedTuple):
    """A request of a verifier for the logits after some tokens."""

    session: str
    tokens: list[int]
    answer: Future[Row]


class LazyTarget:
    """Verifies trees of many sessions in step, with one forward pass for the next token of all of them."""

    def __init__(self, folder: Path, max_context: int) -> None:
        self._model = ResidentModel(build_skeleton(Checkpoint.open(folder), torch.bfloat16), CPU)
        self._max_context = max_context
        self._slots: dict[str, KVSlot] = {}
        self._remembered: OrderedDict[int, NDArray[np.float32]] = OrderedDict()  # by hash of the preceding tokens

    def verify(self, calls: Sequence[VerifyCall], judge: Judge = compute_verdict) -> list[Verdict]:
        """Verify like the target worker's engine; each call's `context` must hold all tokens before its root."""
        questions: SimpleQueue[Question | None] = SimpleQueue()
        with ThreadPoolExecutor(len(calls)) as judges:
            verdicts = [judges.submit(_judge, judge, call, questions) for call in calls]
            num_judging = len(calls)
            while num_judging:  # each verifier asks one more question or ends
                asked = [question for question in (questions.get() for _ in range(num_judging)) if question]
                self._answer(asked)
                num_judging = len(asked)
        return [verdict.result() for verdict in verdicts]

    def _answer(self, questions: Sequence[Question]) -> None:
        names = [prefix_hash(question.tokens) for question in questions]
        new = [index for index, name in enumerate(names) if name not in self._remembered]
        if new:
            segments = [segment for index in new for segment in self._segments(questions[index])]
            logits = self._model.logits(Batch(segments, None, CPU)).float().numpy().copy()
            for index, row in zip(new, logits, strict=True):
                self._slot(questions[index].session).tokens[:] = questions[index].tokens
                self._remembered[names[index]] = row
        for name, question in zip(names, questions, strict=True):
            self._remembered.move_to_end(name)
            question.answer.set_result(self._remembered[name].astype(np.float64))
        while len(self._remembered) > REMEMBERED:
            self._remembered.popitem(last=False)

    def _segments(self, question: Question) -> list[Segment]:
        """Segments of the tokens that the session's slot lacks, with logits after the last one only."""
        slot, tokens = self._slot(question.session), question.tokens
        same = int(np.argmin([*(a == b for a, b in zip(slot.tokens, tokens, strict=False)), False]))
        same = min(same, len(tokens) - 1)
        slot.roll_back(same)
        new, positions = np.asarray(tokens[same:], np.int32), np.arange(same, len(tokens), dtype=np.int32)
        tail = np.zeros((len(new), 0), np.int32)
        parts = ((slice(None, -1), False), (slice(-1, None), True))
        return [
            Segment(slot, new[part], positions[part], positions[part], len(tokens), tail[part], has_logits)
            for part, has_logits in parts
        ]

    def _slot(self, session: str) -> KVSlot:
        if session not in self._slots:
            self._slots[session] = KVSlot(self._model.skeleton.kv_shape(), self._max_context, CPU)
        return self._slots[session]


def _judge(judge: Judge, call: VerifyCall, questions: SimpleQueue[Question | None]) -> Verdict:
    tokens = [*call.context.tokens]

    def logits_after(path: Sequence[int]) -> Row:
        along = [*tokens, *(int(call.tree.tokens[node]) for node in path)]
        question = Question(call.context.session_id, along, Future())
        questions.put(question)
        return question.answer.result()

    try:
        return judge(call, tokens, logits_after)
    finally:
        questions.put(None)
