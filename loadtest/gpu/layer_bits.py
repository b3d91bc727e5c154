"""Checks that a row of a large layer has the same bits at any place in a batch; part of `loadtest.gpu`.

A row's result must not depend on its place, its neighbours or their number. Weights of products lie by rows, or by
columns as unpacked AWQ and GPTQ do, with and without a bias.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bough.model.backend import Norm
from bough.model.backends.triton import kernels
from bough.model.batch.batch import BatchPart, Segment
from bough.model.batch.path_spans import Paths
from bough.model.kv.session_kv import KVSlot
from bough.model.running.device import working_on
from bough.trees.tree import Tree
from loadtest.gpu.parts import HEAD_DIM, HEADS, KV_HEADS
from loadtest.gpu.products import kernels_on
from loadtest.gpu.reference import attend_on_cpu

OTHER_COUNTS = (1, 64)
DTYPES = (torch.bfloat16, torch.float16)
CONTEXT = 90  # keys before a tree: not whole blocks of them
Compute = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Rows:
    """A batch of random rows, one of which is moved through several places."""

    device: torch.device
    num: int
    dtype: torch.dtype
    generator: torch.Generator

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=self.dtype)

    @property
    def places(self) -> list[int]:
        """The ends, and the borders of tiles of several sizes; not row 0, as it is the root of all trees."""
        borders = {border for border in (15, 16, 63, 64, 127, 128) if border < self.num}
        return sorted({1, 2, self.num // 2 - 1, self.num // 2, self.num - 1} | borders)

    def results(self, row: torch.Tensor, compute: Compute) -> list[torch.Tensor]:
        """The result of a row (1, inputs) at each place, with different neighbours each time."""
        found = []
        for place in self.places:
            batch = self.random(self.num, row.shape[1])
            batch[place] = row[0]
            found.append(compute(batch)[place].clone())
        return found


def layer_bits(device: torch.device, matrices: Sequence[tuple[int, int]], num_rows: int) -> dict[str, Any]:
    """Number of places at which a row has the bits of the first: products by (outputs, inputs), norm, attention."""
    found: dict[str, list[bool]] = {}
    generator = torch.Generator(device).manual_seed(0)
    for dtype in DTYPES:
        rows, name = _Rows(device, num_rows, dtype, generator), str(dtype).removeprefix("torch.")
        for layout, is_by_columns in (("rows", False), ("columns", True)):
            equal = found.setdefault(f"products, {name}, weights by {layout}", [])
            for outputs, inputs in matrices:
                weight = rows.random(inputs, outputs).t() if is_by_columns else rows.random(outputs, inputs)
                equal += _product(rows, weight)
                del weight
        hidden_size = matrices[0][1]
        found[f"norm, {name}"] = _alike(_norm(rows, hidden_size))
        found[f"attention, {name}"] = _alike(_attention(rows))
    return {
        "rows": num_rows,
        "compared": sum(map(len, found.values())),
        "equal": sum(map(sum, found.values())),
        "by_kind": {kind: f"{sum(equal)} of {len(equal)}" for kind, equal in found.items()},
    }


@torch.inference_mode()
def _product(rows: _Rows, weight: torch.Tensor) -> list[bool]:
    """Without a bias and with one; also among other numbers of rows."""
    row, equal = rows.random(1, weight.shape[1]), list[bool]()
    for bias in (None, rows.random(len(weight))):
        product = partial(kernels_on(rows.device).multiply, matrix=weight, bias=bias)
        found = rows.results(row, product)
        found += [product(row.expand(count, -1).contiguous())[0] for count in OTHER_COUNTS]
        equal += _alike(found)
    return equal


def _norm(rows: _Rows, hidden_size: int) -> list[torch.Tensor]:
    backend, weight = kernels_on(rows.device), rows.random(hidden_size)
    return rows.results(rows.random(1, hidden_size), lambda batch: backend.norm(batch, weight, 1e-6, Norm()))


def _attention(rows: _Rows) -> list[torch.Tensor]:
    """A child of the root of a tree whose nodes are all such children: its path is the same at each place."""
    tree = Tree.of([*range(rows.num)], [-1, *[0] * (rows.num - 1)], [0.0] * rows.num)
    piece = BatchPart(0, Segment.tree(KVSlot.__new__(KVSlot), CONTEXT, tree))
    paths = Paths.of([piece], [0]).on(rows.device)
    shared = rows.random(2, CONTEXT + 1, KV_HEADS, HEAD_DIM)  # keys and values of the context and the root
    own, rules, found = rows.random(2, KV_HEADS, HEAD_DIM), (HEAD_DIM**-0.5, 0, 0.0, None), []
    query = rows.random(HEADS, HEAD_DIM)
    for place in rows.places:
        keys, values = held = rows.random(2, CONTEXT + rows.num, KV_HEADS, HEAD_DIM)
        held[:, : CONTEXT + 1], held[:, CONTEXT + place] = shared, own
        queries = rows.random(rows.num, HEADS, HEAD_DIM)
        queries[place] = query
        with working_on(rows.device):
            if rows.device.type != "cpu":
                out = kernels().attend(queries, keys, values, paths, *rules)
            else:
                out = attend_on_cpu(queries, keys, values, piece, *rules)
        found.append(out[place].clone())
    return found


def _alike(results: Sequence[torch.Tensor]) -> list[bool]:
    return [torch.equal(result, results[0]) for result in results]
