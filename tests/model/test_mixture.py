"""The demonstration model as a mixture of experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bough.model.batch.batch import Batch, Segment
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.kv.session_kv import KVSlot
from bough.trees.tree import Tree
from draft_worker.model.sources import load_draft
from loadtest.mixture import write_mixture
from tests.fakes.models import CPU


@pytest.mark.parametrize("count", [2, 4])
def test_a_mixture_says_what_the_dense_model_says(count: int, tiny: Path, tmp_path: Path) -> None:
    write_mixture(tiny, tmp_path / "mixture", count)
    tokens = list(range(20, 60))
    dense, mixed = _logits(tiny, tokens), _logits(tmp_path / "mixture", tokens)
    torch.testing.assert_close(mixed, dense, atol=1e-4, rtol=1e-4)
    assert (mixed.argmax(1) == dense.argmax(1)).all()


def _logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    """(num_tokens, vocab_size), as a draft worker makes them."""
    model = load_draft(Checkpoint.open(folder), (), "float32", CPU)
    slot = KVSlot(model.skeleton.kv_shape(), len(tokens), CPU)
    chain = Tree.of(tokens, list(range(-1, len(tokens) - 1)), [0.0] * len(tokens))
    return model.logits(Batch([Segment.tree(slot, 0, chain)], None, CPU)).clone()
