"""What a format of weights in few bits has to do, and what all formats here share.

Every format says the same thing: a weight is an integer times its group's scale, from a zero point on. That is computed
in float32 and rounded to the data type that is computed in: a packed model gives bit for bit what the same model with
its weights written out would give. A format is one file: how its `quantization_config` is read, which tensors belong to
a weight, and how they are written out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import numpy as np
import torch

from bough.errors import CheckpointError
from bough.model.checkpoint.checkpoint import TensorPlace
from bough.model.checkpoint.tensor_source import TensorSource

KERNEL_DTYPES = (torch.bfloat16, torch.float32)  # that kernels for CPUs write; any other goes by way of torch

# What goes by way of torch goes in blocks: whole matrices in float32 would want several times a layer's memory.
BLOCK_ELEMENTS = 1 << 24
BLOCK_BYTES = 32  # at most, for each element of a block while it is made
BLOCK_ROWS = 32  # blocks are multiples of it, hence whole words of any packing


class QuantFormat(Protocol):
    """How a checkpoint's weights are packed, as its config.json says it."""

    @property
    def method(self) -> str:
        """Its `quant_method`."""
        ...

    @property
    def bits(self) -> int:
        """Of every weight; 0 where they differ."""
        ...

    @classmethod
    def of(cls, fields: Mapping[str, Any], where: str) -> QuantFormat:
        """From `quantization_config`, which is at `where`. Raises CheckpointError for a variant that cannot be read."""
        ...

    def weight_name(self, tensor: str) -> str | None:
        """The weight to which a tensor of integers belongs; None for any other tensor."""
        ...

    def source(self, tensor: str, tensors: PackedTensors) -> TensorSource:
        """Takes the tensors of one weight, of which `tensor` has the integers. Raises CheckpointError."""
        ...


class PackedTensors:
    """Tensors of a checkpoint that no weight has taken yet."""

    def __init__(self, remaining: dict[str, TensorPlace]) -> None:
        """`remaining` loses what is taken."""
        self._remaining = remaining

    def __contains__(self, name: object) -> bool:
        return name in self._remaining

    def take(self, name: str, dtypes: Collection[str], beside: TensorPlace | None = None) -> TensorPlace:
        """One of the tensors of a weight whose integers are `beside`.

        Raises:
            CheckpointError: it is missing, or has another data type.
        """
        place = self._remaining.pop(name, None)
        if place is None:
            assert beside is not None, "integers are there: they are what is asked for first"
            raise CheckpointError(f"{beside.file}: tensor {name}, which belongs to {beside.name}, is missing")
        if place.dtype not in dtypes:
            raise CheckpointError(f"{place.file}: tensor {name} is {place.dtype}; {' or '.join(dtypes)} would do")
        return place


def bits_of(fields: Mapping[str, Any], where: str, allowed: Collection[int]) -> int:
    """The number of bits of a weight. Raises CheckpointError for one that is not allowed."""
    named = fields.get("bits") or fields.get("w_bit") or 0
    bits = int(named) if str(named).isdecimal() else named
    if bits not in allowed:
        raise CheckpointError(f"{where}.bits: {bits}; {' or '.join(map(str, allowed))} can be read")
    return int(bits)


def require_matrix(place: TensorPlace) -> None:
    if len(place.shape) != 2:
        raise CheckpointError(f"{place.file}: tensor {place.name} has shape {list(place.shape)}; a matrix would do")


def require_shape(place: TensorPlace, shape: tuple[int, ...]) -> None:
    """Kernels take shapes at their word."""
    if place.shape != shape:
        raise CheckpointError(
            f"{place.file}: tensor {place.name} has shape {list(place.shape)}; {list(shape)} would fit its weight"
        )


def require_groups(scales: TensorPlace, inputs: int, num_groups: int) -> None:
    if num_groups < 1 or inputs % num_groups:
        raise CheckpointError(
            f"{scales.file}: tensor {scales.name} has shape {list(scales.shape)}; {inputs} inputs are not so "
            "many groups of equal size"
        )


def write_out(
    out: torch.Tensor, kernel: Callable[..., None], by_torch: Callable[[slice], torch.Tensor], *inputs: object
) -> None:
    """Fills `out` by a kernel where there is one, otherwise from what `by_torch` gives in float32 for some rows."""
    if out.device.type != "cpu" or out.dtype not in KERNEL_DTYPES:
        step = max(BLOCK_ELEMENTS // out.shape[1] // BLOCK_ROWS, 1) * BLOCK_ROWS
        for begin in range(0, len(out), step):
            rows = slice(begin, min(begin + step, len(out)))
            out[rows] = by_torch(rows)
        return
    is_bf16 = out.dtype == torch.bfloat16
    target = out.view(torch.uint16) if is_bf16 else out
    kernel(*(_array(x) if isinstance(x, torch.Tensor) else x for x in inputs), target.numpy(), is_bf16)


def _array(values: torch.Tensor) -> np.ndarray[Any, Any]:
    """For kernels, which take float16 as its bits."""
    return (values.view(torch.uint16) if values.dtype == torch.float16 else values).numpy()
