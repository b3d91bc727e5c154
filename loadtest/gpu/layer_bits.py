"""Checks that a row of a large layer has the same bits at any place in a batch; part of `loadtest.gpu`.

All products of a sweep have the same number of rows, so a row's result should not depend on its place or neighbours. A
library could divide sums among processors (split-K, stream-K) and round differently by place; torch's setting against
that is tried, with its cost. Other row counts are reported for comparison. Weights lie by rows, or by columns as
unpacked AWQ and GPTQ do, with and without a bias, for which libraries use different kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from bough.model.backends.triton import accumulate_in_float32, kernels
from bough.model.batch.batch import BatchPart, Segment
from bough.model.batch.path_spans import Paths
from bough.model.kv.session_kv import KVSlot
from bough.model.running.device import working_on
from bough.trees.tree import Tree
from loadtest.gpu.parts import HEAD_DIM, HEADS, KV_HEADS, device_milliseconds
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
    others = dict.fromkeys(OTHER_COUNTS, True)
    generator = torch.Generator(device).manual_seed(0)
    for dtype in DTYPES:
        rows, name = _Rows(device, num_rows, dtype, generator), str(dtype).removeprefix("torch.")
        for layout, is_by_columns in (("rows", False), ("columns", True)):
            equal = found.setdefault(f"products, {name}, weights by {layout}", [])
            for outputs, inputs in matrices:
                weight = rows.random(inputs, outputs).t() if is_by_columns else rows.random(outputs, inputs)
                equal += _product(rows, weight, others)
                del weight
        hidden_size = matrices[0][1]
        norm = LlamaRMSNorm(hidden_size).to(device, dtype)
        found[f"norm, {name}"] = _alike(rows.results(rows.random(1, hidden_size), norm))
        found[f"attention, {name}"] = _alike(_attention(rows))
    return {
        "rows": num_rows,
        "compared": sum(map(len, found.values())),
        "equal": sum(map(sum, found.values())),
        "by_kind": {kind: f"{sum(equal)} of {len(equal)}" for kind, equal in found.items()},
        "equal_at_other_counts": others,
        "with_undivided_sums": _with_undivided_sums(_Rows(device, num_rows, DTYPES[0], generator), matrices),
    }


@torch.inference_mode()
def _product(rows: _Rows, weight: torch.Tensor, others: dict[int, bool]) -> list[bool]:
    """Without a bias and with one."""
    row, equal = rows.random(1, weight.shape[1]), list[bool]()
    for bias in (None, rows.random(len(weight))):
        product = partial(torch.nn.functional.linear, weight=weight, bias=bias)
        found = rows.results(row, product)
        for count in OTHER_COUNTS:
            others[count] &= torch.equal(product(row.expand(count, -1).contiguous())[0], found[0])
        equal += _alike(found)
    return equal


def _with_undivided_sums(rows: _Rows, matrices: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Equal places if cuBLAS must not divide sums, and milliseconds of all products with and without that setting."""
    equal, ms = list[bool](), {True: 0.0, False: 0.0}
    for outputs, inputs in matrices:
        weight, batch = rows.random(outputs, inputs), rows.random(rows.num, inputs)
        for may_divide in ms:
            try:
                with _sums(may_divide):
                    product = partial(torch.nn.functional.linear, batch, weight)
                    ms[may_divide] += device_milliseconds(product, rows.device)
                    equal += [] if may_divide else _product(rows, weight, dict.fromkeys(OTHER_COUNTS, True))
            except (RuntimeError, TypeError) as exc:  # this version or GPU does not have the setting
                return {"error": str(exc)}
    return {"equal": f"{sum(equal)} of {len(equal)}", "ms": round(ms[False], 3), "ms_in_a_sweep": round(ms[True], 3)}


@contextmanager
def _sums(may_divide: bool) -> Iterator[None]:
    """Within the block, allow products in bfloat16 to divide sums, or not."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, may_divide)
    try:
        yield
    finally:
        accumulate_in_float32()


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
