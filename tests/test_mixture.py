"""The demonstration model as a mixture of experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_distill import plain_logits

from loadtest.mixture import write_mixture


@pytest.mark.parametrize("count", [2, 4])
def test_a_mixture_says_what_the_dense_model_says(count: int, tiny: Path, tmp_path: Path) -> None:
    write_mixture(tiny, tmp_path / "mixture", count)
    tokens = list(range(20, 60))
    dense, mixed = plain_logits(tiny, tokens), plain_logits(tmp_path / "mixture", tokens)
    torch.testing.assert_close(mixed, dense, atol=1e-4, rtol=1e-4)
    assert (mixed.argmax(1) == dense.argmax(1)).all()
