"""Rows of a sweep without padding: a row's bits are the same among any others, in one part of a layer or in several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bough.model.backend import computing_by, in_counts
from bough.model.batch.batch import Batch, Segment
from bough.sizing.row_counts import RowCounts
from bough.trees.tree import Tree
from loadtest.common.tiny_model import save_model
from target_worker.sweep.streamed_model import StreamedModel
from tests.fakes.gpu import pretend
from tests.fakes.gpu.device_sweeps import Where, _arena, on_the_device
from tests.fakes.gpu.pretend import device, pretending
from tests.fakes.model.families import FAMILIES, of_two_layers, random_tree
from tests.fakes.tiers import long_but

PROMPT, MOST_PART = [5, 6, 7, 8, 9], 1024


@pytest.fixture
def rounding_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's results depend on the number of rows, far more than by rounding."""
    launch = pretend._launched

    def launched(func: Any, name: str, *args: Any) -> Any:
        out = launch(func, name, *args)
        if name in {"linear", "mm", "addmm", "bmm", "mean"}:
            out.raw.mul_(1 + out.shape[:-1].numel() / 1000)
        return out

    monkeypatch.setattr(pretend, "_launched", launched)


def beside(model: StreamedModel, num_others: int, is_last: bool) -> torch.Tensor:
    """Logits of a tree below a prompt, in a sweep with another session's tree of so many nodes."""
    arena, rng = _arena(model, device()), np.random.default_rng(num_others)
    slot, other = arena.take(64), arena.take(64)
    model.sweep(Batch([Segment.context(slot, 0, PROMPT)], model.rows, model.device))
    slot.compact(range(len(PROMPT)), PROMPT)
    own = Segment.tree(slot, len(PROMPT), random_tree(np.random.default_rng(3), 9, root=4))
    segments = [own] if not num_others else [own, Segment.tree(other, 0, random_tree(rng, num_others, root=7))]
    logits = model.sweep(Batch(segments[::-1] if is_last else segments, model.rows, model.device))[0].cpu()
    return logits[-9:] if is_last else logits[:9]


@pytest.mark.slow
@pytest.mark.usefixtures("rounding_by_rows")
@pytest.mark.parametrize("name", ["triton", "cublas", "reference"])
@pytest.mark.parametrize("family", long_but(["llama", "mixtral"], FAMILIES))
def test_a_row_has_the_same_bits_among_any_others(name: str, family: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", of_two_layers(family))
    found = []
    with computing_by(name), pretending():
        for part in (MOST_PART, 16) if name != "reference" else (16,):
            with on_the_device(folder, Where(), torch.bfloat16, part) as model:
                assert model.rows.step == (16 if name == "reference" else 1)
                found += [beside(model, num_others, is_last) for num_others, is_last in ((0, False), (23, True))]
                found.append(beside(model, 40, is_last=False))
    assert all(torch.equal(logits, found[0]) for logits in found)


def test_functions_are_called_with_allowed_numbers_of_rows_only() -> None:
    """Of a step's multiples up to the most; padding does not come back."""
    met = []

    def twice(rows: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        met.append(len(rows))
        return 2 * rows + other

    numbers = torch.arange(22.0).view(11, 2)
    assert torch.equal(in_counts(twice, RowCounts(8, 4), numbers, numbers), 3 * numbers)
    assert met == [8, 4]
    across = in_counts(lambda part: part + part.shape[1], RowCounts(16, 16), numbers[None], axis=1)
    assert torch.equal(across[0], numbers + 16)


def test_a_sweep_has_no_padding(tiny: Path) -> None:
    with pretending(), on_the_device(tiny, Where(), torch.bfloat16, MOST_PART) as model:
        slot = _arena(model, device()).take(8)
        batch = Batch([Segment.tree(slot, 0, Tree.root(3))], model.rows, model.device)
        assert batch.num_rows == 1
        assert model.rows == RowCounts(MOST_PART, 1)


def test_layers_may_run_row_by_row(tiny: Path) -> None:
    """By --rows 1 a GPU had no product; its arithmetic is the same as with any other number."""
    found, arithmetic = [], set()
    for part in (1, MOST_PART):
        with pretending(), on_the_device(tiny, Where(), torch.bfloat16, part) as model:
            slot = _arena(model, device()).take(8)
            batch = Batch([Segment.tree(slot, 0, Tree.of([3, 4], [-1, 0], [0.0, 0.0]))], model.rows, model.device)
            found.append(model.sweep(batch)[0].cpu())
            arithmetic.add(model.arithmetic)
    assert torch.equal(*found)
    assert arithmetic == {"products of single rows"}
