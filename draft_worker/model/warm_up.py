"""Compiles the kernels that a draft step needs besides the model, before the first call."""

from __future__ import annotations

import numpy as np
import torch

from bough.protocol.sampling_params import SamplingParams
from bough.trees.tree_plan import BestFirst
from draft_worker.candidates.candidates import Guessing
from draft_worker.candidates.temperature_scaling import TemperatureScaling, scaled
from draft_worker.candidates.top_k import largest
from draft_worker.expansions.cached_growth import CachedGrowth
from draft_worker.expansions.expansion_cache import ExpansionCache
from draft_worker.growth.best_first import BestFirstGrower
from draft_worker.model.model_draft import NUM_CONSIDERED


def warm_up_choosing(vocab_size: int, device: torch.device) -> None:
    """Choose the largest of some logits, compute candidates, and grow a tree of two nodes."""
    values, tokens = largest(torch.zeros(1, vocab_size, device=device), NUM_CONSIDERED)
    for temperature in (0.0, 1.0):
        guessing = Guessing(SamplingParams(temperature=temperature), 0, is_sample=False, is_perturbed=temperature > 0)
        likely = guessing.candidates(values, tokens, np.zeros(1, np.int32))
    explored, stop_tokens = ExpansionCache(0), np.zeros(0, np.int32)
    walk = CachedGrowth(
        BestFirstGrower(0, BestFirst(budget=2, width=1, depth=1), max_children=1, stop_tokens=stop_tokens), explored
    )
    walk.advance()
    explored.learn(explored.wanted(*walk.missing()), likely)
    walk.advance()
    explored.walk([0])
    TemperatureScaling().observe(likely, np.zeros(1, np.int32))
    scaled(likely.log_probs, 2.0)
