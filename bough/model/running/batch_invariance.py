"""A row's result is the same bits at any place in any batch (docs/design.md, rule 2), and what that takes.

A library's matrix products round differently for different numbers of rows. So either products are our own, in which
no row knows of any other, or all of them have one number of rows, padding included. What works on one number at a time
torch cuts into vectors, and rounds what is left over otherwise: where it cuts must not depend on what is in the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from bough.model.architecture.moe import has_own_products
from bough.model.cpu.gemm import GROUP, LINE_BYTES
from bough.model.cpu.linear import can_multiply, is_left_to_us, multiply
from bough.model.cpu.threads import all_threads
from bough.model.loading.loading import Skeleton
from bough.model.quant.format import QuantFormat
from bough.sizing.row_counts import OWN_MOST, RowCounts

Product = Callable[..., torch.Tensor]  # of rows, a matrix (outputs, inputs), and perhaps a bias
STEP = 4  # rows that are padded to where products are our own: two threads cut that into whole vectors


def make_reproducible(skeleton: Skeleton, most: int, device: torch.device) -> RowCounts:
    """Replaces a model's products; says how many rows go through its layers together: `most` where all must be so many.

    The model must then be computed with by `compute_reproducibly_with`.
    """
    counts = row_counts(skeleton.model, skeleton.quantization, skeleton.dtype, most, device.type)
    decoder, head = skeleton.model.get_decoder(), skeleton.model.get_output_embeddings()
    if device.type == "cpu":
        product = product_of(counts)
        for module in (*_linears(decoder.layers), head):
            module.forward = partial(_forward, module, product)
        for module in _others(decoder.layers):
            if not has_own_products(module):
                module.forward = _with_product(module.forward, product)
    for module in (decoder.norm, head):
        module.forward = _in_counts(module.forward, counts)
    return counts


def row_counts(
    model: PreTrainedModel, quantization: QuantFormat | None, dtype: torch.dtype, most: int, device_type: str
) -> RowCounts:
    """Always `most` where some product may be a library's: on a GPU, in float16, of weights that are packed transposed.

    Likewise where torch might cut a step of rows: with experts, in unusual sizes. `model` may be on the meta device.
    """
    layers = model.get_decoder().layers
    linears = (*_linears(layers), model.get_output_embeddings())
    is_ours = (
        device_type == "cpu"
        and (quantization is None or quantization.method == "bough")
        and all(can_multiply(module.in_features, dtype) and _is_usual(module, dtype) for module in linears)
        and not _others(layers)
    )
    return RowCounts(max(most, OWN_MOST) // STEP * STEP, STEP) if is_ours else RowCounts(most, most)


def _is_usual(linear: nn.Linear, dtype: torch.dtype) -> bool:
    """Whether torch cuts a step of rows that come from it, or go to it, into whole vectors."""
    return linear.out_features >= GROUP and linear.in_features * dtype.itemsize % LINE_BYTES == 0


def product_of(counts: RowCounts) -> Product:
    """What computes a linear layer: of rows, its matrix and its bias."""
    return multiply if counts.step < counts.most else _fixed_product


def describe(counts: RowCounts) -> str:
    """What two workers must have in common to give the same bits, beside device and library."""
    return "products of single rows" if counts.step < counts.most else f"products of {counts.most} rows"


def _linears(layers: nn.ModuleList) -> list[nn.Linear]:
    return [module for module in layers.modules() if isinstance(module, nn.Linear)]


def _others(layers: nn.ModuleList) -> list[nn.Module]:
    """That have matrices of their own: experts, and routers to them."""
    others = [module for module in layers.modules() if not isinstance(module, nn.Linear)]
    return [module for module in others if any(p is not None and p.dim() > 1 for p in module._parameters.values())]


class _Products(TorchFunctionMode):
    """Has products that are written as calls of `nn.functional.linear` computed by one of ours."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self._product = product

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (self._product if func is nn.functional.linear else func)(*args, **(kwargs or {}))


def _with_product(function: Callable[..., Any], product: Product) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _Products(product):
            return function(*args, **kwargs)

    return run


def _forward(module: nn.Linear, product: Product, rows: torch.Tensor) -> torch.Tensor:
    return product(rows, module.weight, module.bias)


def _fixed_product(rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Of a number of rows that is always the same."""
    if is_left_to_us(rows, matrix):
        return multiply(rows, matrix, bias)
    with all_threads():
        return nn.functional.linear(rows, matrix, bias)


def _in_counts(function: Callable[..., torch.Tensor], counts: RowCounts) -> Callable[..., torch.Tensor]:
    """A function of (1, n, features) rows, called on allowed numbers of rows whatever n is."""

    def run(hidden: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        count = hidden.shape[1]
        padded = nn.functional.pad(hidden, (0, 0, 0, counts.padded(count) - count))
        parts = [function(part, **kwargs) for part in torch.split(padded, counts.most, dim=1)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))[:, :count]

    return run
