"""Makes a row's result the same bits at any place in any batch (docs/design.md, rule 2).

A library's matrix products round differently for different numbers of rows. So either our own products are used, which
treat each row separately, or all products have the same number of rows, including padding. On a CPU torch splits
element-wise work into vectors and rounds the remainder differently: the split must not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from bough.model.architecture.latent import is_latent
from bough.model.architecture.moe import has_own_products
from bough.model.backend import Backend, backend_of, in_counts
from bough.model.loading.loading import Skeleton
from bough.model.quant.format import WeightFormat
from bough.model.running.fused_parts import fuse_parts
from bough.sizing.row_counts import OWN_MOST, RowCounts

Product = Callable[..., torch.Tensor]  # of rows, a matrix (outputs, inputs) and an optional bias
STEP = 4  # rows are padded to multiples of this for our own products: two threads split that into whole vectors


def make_reproducible(skeleton: Skeleton, most: int, device: torch.device) -> RowCounts:
    """Replace a model's products; returns the numbers of rows that its layers compute together, perhaps only `most`.

    The model must then run under `compute_reproducibly_with`.
    """
    backend = backend_of(device)
    counts = row_counts(skeleton.model, skeleton.quantization, skeleton.dtype, most, backend)
    decoder, head = skeleton.model.get_decoder(), skeleton.model.get_output_embeddings()
    if backend.takes_any_rows:
        fuse_parts(decoder, backend)
    product = product_of(counts, backend)
    for module in (*_linears(decoder.layers), head):
        module.forward = partial(_forward, module, product)
    for module in _others(decoder.layers):
        if not has_own_products(module):
            module.forward = _with_product(module.forward, product)
    if backend.takes_any_rows:
        return counts
    for module in (decoder.norm, head):
        module.forward = partial(in_counts, module.forward, counts, axis=1)
    return counts


def row_counts(
    model: PreTrainedModel, quantization: WeightFormat | None, dtype: torch.dtype, most: int, backend: Backend
) -> RowCounts:
    """Row counts: always `most` if a library may compute products: in float16, or with transposed packing.

    The same holds with latent attention, and if torch may split a step of rows: with experts, or unusual sizes. A part
    of a model computes as the whole of it. `model` may be on the meta device.
    """
    if backend.takes_any_rows:
        return RowCounts(most, 1)
    decoder: Any = model.get_decoder()
    (layers,) = getattr(decoder, "all_layers", [decoder.layers])
    linears = (*_linears(layers), model.get_output_embeddings())
    is_ours = (
        (quantization is None or not quantization.is_transposed)
        and all(backend.fits_single_rows(module, dtype) for module in linears)
        and not _others(layers)
        and not any(map(is_latent, layers.modules()))
    )
    return RowCounts(max(most, OWN_MOST) // STEP * STEP, STEP) if is_ours else RowCounts(most, most)


def product_of(counts: RowCounts, backend: Backend) -> Product:
    """The product for linear layers."""
    return backend.multiply if _are_single(counts, backend) else backend.linear


def describe(counts: RowCounts, backend: Backend) -> str:
    """Description of the arithmetic, which must be equal for two workers to give the same bits."""
    return "products of single rows" if _are_single(counts, backend) else f"products of {counts.most} rows"


def _are_single(counts: RowCounts, backend: Backend) -> bool:
    """Whether a product treats each row separately."""
    return backend.takes_any_rows or counts.step < counts.most


def _linears(layers: nn.ModuleList) -> list[nn.Linear]:
    return [module for module in layers.modules() if isinstance(module, nn.Linear)]


def _others(layers: nn.ModuleList) -> list[nn.Module]:
    """Modules other than linear layers with matrices: experts and routers."""
    others = [module for module in layers.modules() if not isinstance(module, nn.Linear)]
    return [module for module in others if any(p is not None and p.dim() > 1 for p in module._parameters.values())]


class _Products(TorchFunctionMode):
    """Replaces calls of `nn.functional.linear` by another product."""

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
