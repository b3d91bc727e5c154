"""Weights of 4 or 8 bits by rows, with a scale for each group, row or block, or for the whole matrix.

compressed-tensors, the FP8 checkpoints of DeepSeek and Qwen, MXFP4 and NVFP4 use this; a module for each reads
config.json. NVFP4 has scales in two levels: E4M3 numbers for each 16 inputs, and one for the whole matrix.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bough.errors import CheckpointError
from bough.model.architecture.moe import ExpertSources
from bough.model.checkpoint.container import TensorPlace
from bough.model.checkpoint.safetensors_folder import ITEM_BYTES
from bough.model.checkpoint.tensor_source import VALUE_DTYPES, parts_of, typed
from bough.model.packed import Along
from bough.model.quant.format import (
    Dequantized,
    PackedTensors,
    place_of,
    require_matrix,
    require_shape,
)

# Dtypes of numbers: unsigned in words of 32 bits, two E2M1 numbers in each byte, or one number in each byte.
WORDS, FLOAT4, INT8, FLOAT8 = "I32", "U8", "I8", "F8_E4M3"
EXPONENTS = "F8_E8M0"  # dtype of scales that are powers of two
WHOLE_DIVISOR, WHOLE_FACTOR = "_global_scale", "_scale_2"  # divisor or factor of the other scales, by name
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
UNSET = -1  # in group indices: there are none
SPARE = (  # endings of tensors that are for activations and caches, or of a symmetric weight's zero points
    *(f".{of}_{what}" for of in ("input", "output", "q", "k", "v") for what in ("scale", "zero_point", "global_scale")),
    ".activation_scale",
    ".weight_zero_point",
)


@dataclass(frozen=True, slots=True)
class StoredAs:
    """How a weight is stored, according to config.json."""

    dtype: str  # of the tensor with its numbers: WORDS, FLOAT4, INT8 or FLOAT8
    bits: int  # of a number
    strategy: (
        str  # parts with their own scale: "tensor", "channel" (an output), "block", "group"; "": tensor or channel
    )
    size: tuple[int, int] = (1, 1)  # outputs and inputs of a block or group
    is_symmetric: bool = True  # zero points are 0, or the middle of unsigned numbers
    is_ordered: bool = True  # a group's inputs are consecutive
    whole: str = ""  # WHOLE_DIVISOR or WHOLE_FACTOR, of scales in two levels

    def source(self, tensor: str, scale_names: Sequence[str], tensors: PackedTensors) -> Scaled | ExpertSources:
        """Take the tensors of a weight whose numbers are `tensor`; the first of its `scale_names` that exists.

        A tensor of E4M3 numbers without its own module is a stack of experts.

        Raises:
            CheckpointError: one is missing, or has another dtype or shape.
        """
        numbers = tensors.take(tensor, (self.dtype,))
        dtypes = (FLOAT8,) if self.whole else (*VALUE_DTYPES, EXPONENTS)
        scales = tensors.take(next((n for n in scale_names if n in tensors), scale_names[0]), dtypes, numbers)
        if tensor.endswith((".weight", ".weight_packed")):
            return self._matrix(numbers, scales, tensors)
        if len(numbers.shape) != 3 or scales.shape[:1] != numbers.shape[:1]:
            raise CheckpointError(
                f"{numbers.file}: tensors {tensor} and {scales.name} must have the same number of experts, outputs and "
                f"inputs each, got shapes {list(numbers.shape)} and {list(scales.shape)}"
            )
        parts = zip(parts_of(numbers), parts_of(scales), strict=True)
        return ExpertSources(tuple(self._matrix(*of, tensors) for of in parts))

    def _matrix(self, numbers: TensorPlace, scales: TensorPlace, tensors: PackedTensors) -> Scaled:
        """A matrix with these numbers, scales and other tensors."""
        require_matrix(numbers)
        outputs, inputs = Scaled(numbers, scales, None, None, self.bits, (1, 1)).shape
        base, blocks = numbers.name.removesuffix("_packed"), self._blocks(outputs, inputs)
        if scales.shape not in blocks:
            require_shape(scales, next(reversed(blocks)))
        block = blocks[scales.shape]
        num_groups = -(-inputs // block[1])
        _require_stored_shape(f"{base}_shape", [outputs, inputs], tensors)
        zeros = None
        if not self.is_symmetric:
            zeros = tensors.take(f"{base}_zero_point", (WORDS,), numbers)
            require_shape(zeros, (-(-outputs * self.bits // 32), num_groups))
        groups = self._groups(f"{base}_g_idx", numbers, inputs, num_groups, tensors)
        whole = tensors.take(base + self.whole, ("F32",), numbers) if self.whole else None
        if whole is not None and whole.shape:
            require_shape(whole, (1,))
        return Scaled(numbers, scales, zeros, groups, self.bits, block, whole, self.whole == WHOLE_DIVISOR)

    def _blocks(self, outputs: int, inputs: int) -> dict[tuple[int, ...], tuple[int, int]]:
        """Allowed shapes of scales, the usual one last, each with the outputs and inputs that share a scale."""
        whole = dict.fromkeys(((1, 1), (), (1,)), (outputs, inputs))
        rows = dict.fromkeys(((outputs,), (outputs, 1)), (1, inputs))
        height, width = self.size
        blocks: dict[tuple[int, ...], tuple[int, int]] = {(-(-outputs // height), -(-inputs // width)): self.size}
        return {"tensor": whole, "channel": rows, "": rows | whole}.get(self.strategy, blocks)

    def _groups(
        self, name: str, numbers: TensorPlace, inputs: int, num_groups: int, tensors: PackedTensors
    ) -> TensorPlace | None:
        """The group of each input, if they are not consecutive."""
        if self.is_ordered and name not in tensors:
            return None
        groups = tensors.take(name, ("I32",), numbers)
        require_shape(groups, (inputs,))
        found = tensors.integers(groups)
        return None if found is None or UNSET in found else tensors.unless_in_order(groups, num_groups)

    def sample(self, outputs: int, inputs: int) -> Scaled:
        """A matrix without a file."""
        (*shape, block), is_two_level = (*next(reversed(self._blocks(outputs, inputs).items())),), bool(self.whole)
        per_number = {WORDS: 32 // self.bits, FLOAT4: 2}.get(self.dtype, 1)
        scales = FLOAT8 if is_two_level else EXPONENTS if self.dtype == FLOAT4 else "F16"
        groups = None if self.is_ordered else place_of(WORDS, inputs)
        zeros = None if self.is_symmetric else place_of(WORDS, -(-outputs * self.bits // 32), -(-inputs // block[1]))
        return Scaled(
            place_of(self.dtype, outputs, inputs // per_number),
            place_of(scales, *shape[0]),
            zeros,
            groups,
            self.bits,
            block,
            place_of("F32", 1) if is_two_level else None,
            self.whole == WHOLE_DIVISOR,
        )


def nvfp4(whole: str) -> StoredAs:
    """NVFP4; the name of the whole matrix's scale gives its meaning."""
    return StoredAs(FLOAT4, 4, "group", (1, 16), whole=whole)


def _require_stored_shape(name: str, shape: list[int], tensors: PackedTensors) -> None:
    """Compare the shape that a checkpoint states with that of the numbers, which must fill their words."""
    if name not in tensors:
        return
    place = tensors.take(name, ("I32", "I64"))
    require_shape(place, (len(shape),))
    found = tensors.integers(place)
    if found is not None and found.tolist() != shape:
        raise CheckpointError(f"{place.file}: tensor {name} must be {shape}, as its numbers are, got {found.tolist()}")


@dataclass(frozen=True, slots=True)
class Scaled(Dequantized):
    """A weight of numbers by rows: (number - zero) * scale."""

    numbers: TensorPlace  # (outputs, inputs) INT8 or FLOAT8, or (outputs, n) WORDS or FLOAT4, their lowest bits first
    scales: TensorPlace  # one for each block, by rows
    zeros: TensorPlace | None  # (words, groups) WORDS along outputs; None: 0, or the middle of unsigned numbers
    groups: TensorPlace | None  # (inputs,) I32: group of each input; None if consecutive
    bits: int
    block: tuple[int, int]  # outputs and inputs that share a scale
    whole: TensorPlace | None = None  # F32, one for the matrix
    is_divided: bool = False  # the scales are divided by the whole's scale instead of multiplied

    @property
    def shape(self) -> tuple[int, ...]:
        outputs, elements = self.numbers.shape
        return (outputs, elements * ITEM_BYTES[self.numbers.dtype] * 8 // self.bits)

    @property
    def order(self) -> tuple[TensorPlace | None, int]:
        return self.groups, self.scales.shape[-1]

    def packed(self, raw: Sequence[torch.Tensor]) -> Along:
        height, width = self.block
        (outputs, inputs), given = self.shape, (typed(*part) for part in zip(raw, self.places, strict=True))
        numbers, scales, *others = given
        whole = others.pop() if self.whole else None
        groups = others.pop() if self.groups else None
        zeros = others.pop() if self.zeros else None
        scales = scales.view(-(-outputs // height), -(-inputs // width))
        return Along(numbers, scales, zeros, groups, self.bits, self.block, whole, self.is_divided)


def block_size(found: Any, where: str) -> tuple[int, int]:
    """Outputs and inputs of a block, from a configuration's [128, 128] or "128x128"."""
    parts = found.split("x") if isinstance(found, str) else found
    numbers = [int(part) for part in parts if str(part).isdecimal()] if isinstance(parts, list | tuple) else []
    if len(numbers) != 2 or len(parts) != 2 or min(numbers) < 1:
        raise CheckpointError(f"{where}: must be the outputs and inputs of a block, such as [128, 128], got {found!r}")
    return numbers[0], numbers[1]


def unquantized(changed: Collection[str]) -> str:
    """The note about fields of config.json that quantize something other than weights."""
    if not changed:
        return ""
    return (
        f"weights are read exactly as stored; values that {' and '.join(sorted(changed))} of its config.json would "
        "quantize in other software stay in the compute dtype"
    )
