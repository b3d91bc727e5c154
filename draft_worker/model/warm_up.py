"""Compiles the kernels that a draft step needs besides the model, before the first call."""

from __future__ import annotations

import numpy as np
import torch

from bough.protocol.sampling_params import SamplingParams
from draft_worker.candidates.candidates import Guessing
from draft_worker.candidates.top_k import largest
from draft_worker.model.model_draft import NUM_CONSIDERED


def warm_up_choosing(vocab_size: int, device: torch.device) -> None:
    """Choose the largest of some logits, and perturb them as the target will."""
    values, tokens = largest(torch.zeros(1, vocab_size, device=device), NUM_CONSIDERED)
    guessing = Guessing(SamplingParams(temperature=1.0), 0, is_sample=False, is_perturbed=True)
    guessing.candidates(values, tokens, np.zeros(1, np.int32))
