"""Has numba compile what a draft step takes beside the model, before anybody waits for a tree."""

from __future__ import annotations

import numpy as np
import torch

from bough.growth import BestFirst
from draft_worker.best_first import BestFirstGrower
from draft_worker.engine import NUM_CONSIDERED
from draft_worker.explored import Explored
from draft_worker.grow import Candidates
from draft_worker.top import largest
from draft_worker.walk import Walk


def warm_up_choosing(vocab_size: int, device: torch.device) -> None:
    """Looks for the largest of some logits, and grows a tree of two nodes."""
    largest(torch.zeros(1, vocab_size, device=device), NUM_CONSIDERED)
    explored, closed = Explored(0), np.zeros(0, np.int32)
    walk = Walk(BestFirstGrower(0, BestFirst(budget=2, width=1, depth=1), branch=1, closed=closed), explored)
    certain = Candidates(np.zeros((1, 1), np.int32), np.zeros((1, 1), np.float32))
    walk.advance()
    explored.learn(explored.wanted(*walk.missing()), certain)
    walk.advance()
    explored.walk([0])
