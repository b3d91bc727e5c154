"""A target that computes logits only where a verdict asks for them: for counting what trees would come to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from bough.messages import Verdict, VerifyCall
from bough.model.batch import Batch, Segment
from bough.model.checkpoint import Checkpoint
from bough.model.draw import Row
from bough.model.kv import KVSlot
from bough.model.loading import build_skeleton
from bough.model.runner import ResidentModel
from target_worker.judge import judge


class LazyTarget:
    """Holds one session's keys and values for each name, and the logits after each of its tokens."""

    def __init__(self, folder: Path, max_context: int) -> None:
        skeleton = build_skeleton(Checkpoint.open(folder), torch.bfloat16)
        self._model = ResidentModel(skeleton, torch.device("cpu"))
        self._max_context = max_context
        self._slots: dict[str, KVSlot] = {}
        self._logits: dict[str, dict[int, Row]] = {}  # by session and length of the text before

    def verify(self, call: VerifyCall) -> Verdict:
        """As the target worker's engine does; `call.context` holds all tokens before the root."""
        tokens = [*call.context.tokens]

        def logits_after(path: Sequence[int]) -> Row:
            return self._logits_after(call.context.session_id, [*tokens, *(int(call.tree.tokens[n]) for n in path)])

        return judge(call, tokens, logits_after)

    def _logits_after(self, session: str, tokens: list[int]) -> Row:
        """(vocab_size,) after these tokens. Texts of a session share beginnings, of which nothing is run twice."""
        if session not in self._slots:
            shape = self._model.skeleton.kv_shape()
            self._slots[session] = KVSlot(shape, self._max_context, torch.device("cpu"))
            self._logits[session] = {}
        slot, known = self._slots[session], self._logits[session]
        same = int(np.argmin([*(a == b for a, b in zip(slot.tokens, tokens, strict=False)), False]))
        if same == len(tokens) and len(tokens) in known:
            return known[len(tokens)]
        same = min(same, len(tokens) - 1)
        del slot.tokens[same:]
        for length in [length for length in known if length > same]:
            del known[length]
        new = np.asarray(tokens[same:], np.int32)
        positions = np.arange(same, len(tokens), dtype=np.int32)
        tail = np.zeros((len(new), 0), np.int32)
        segments = [
            Segment(slot, new[:-1], positions[:-1], positions[:-1], len(tokens), tail[:-1], False),
            Segment(slot, new[-1:], positions[-1:], positions[-1:], len(tokens), tail[-1:], True),
        ]
        logits = self._model.logits(Batch(segments, None, torch.device("cpu")))
        slot.tokens.extend(new.tolist())
        known[len(tokens)] = logits[0].double().numpy()
        return known[len(tokens)]
