"""Products by the library, which may round by what it is given: always as many rows, without gaps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bough.model.backend import load
from bough.model.backends.cublas import FIXED


@pytest.mark.parametrize("num_rows", [3, FIXED.most, FIXED.most + 1])
def test_the_library_gets_rows_without_gaps(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With just as many rows as are allowed it got them as they were, a part of wider rows with other strides."""
    given: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def noting(function: Any) -> Any:
        def run(rows: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
            given.append((tuple(rows.shape), rows.stride()))
            return function(rows, *others)

        return run

    monkeypatch.setattr(torch.nn.functional, "linear", noting(torch.nn.functional.linear))
    monkeypatch.setattr(torch, "bmm", noting(torch.bmm))
    rows, matrices = torch.ones(num_rows, 2, 48), torch.ones(2, 8, 24)
    assert load("cublas").multiply(rows[:, 0, 8:32], matrices[0]).eq(24).all()
    assert set(given) == {((FIXED.most, 24), (24, 1))}
    given.clear()
    found = load("cublas").linear_by_head(rows.transpose(0, 1)[:, :, 8:32], matrices)
    assert found.shape == (num_rows, 2, 8)
    assert set(given) == {((2, FIXED.most, 24), (FIXED.most * 24, 24, 1))}
