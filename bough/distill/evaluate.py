"""How often a student's guess is the teacher's token."""

from __future__ import annotations

from typing import NamedTuple

import torch

from bough.distill.rows import Rows
from bough.distill.teacher import Network

NUM_GUESSES = 4
BATCH_ROWS = 8


class Agreement(NamedTuple):
    """Of a student with its teacher, over the tokens of answers."""

    top1: float  # the student's first guess is the teacher's
    top4: float  # one of its first four is
    loss: float  # mean of `bough.distill.loss`
    num_tokens: int

    def __str__(self) -> str:
        return f"top-1 {self.top1:.3f}, top-{NUM_GUESSES} {self.top4:.3f}, loss {self.loss:.3f}"


@torch.inference_mode()
def agreement(student: Network, rows: Rows, opening: torch.Tensor) -> Agreement:
    """Measured on the answers in some rows."""
    top1 = top4 = num_tokens = 0
    loss = 0.0
    for begin in range(0, len(rows.tokens), BATCH_ROWS):
        part = rows.take(torch.arange(begin, min(begin + BATCH_ROWS, len(rows.tokens)))).to(student.device)
        hidden = student.hidden(part.placed(opening))[:, len(opening) :][part.is_answer]
        ids, log_probs = part.top_ids[part.is_answer], part.top_log_probs[part.is_answer]
        guesses = student.logits(hidden).topk(NUM_GUESSES, dim=1).indices
        hits = guesses == ids[:, :1]
        top1 += int(hits[:, 0].sum())
        top4 += int(hits.sum())
        num_tokens += len(hidden)
        loss += float(student.loss(hidden, ids, log_probs)) * len(hidden)
    return Agreement(top1 / num_tokens, top4 / num_tokens, loss / num_tokens, num_tokens)
