"""What quantized formats share.

In every format a weight is (number - zero point) * scale of its group, computed in float32 and rounded to the compute
dtype, so that a packed model gives the same bits as the same model stored dequantized. A format is one file: how its
`quantization_config` is read, which tensors belong to a weight, and how they are dequantized.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
import torch

from bough.errors import CheckpointError
from bough.model.architecture.moe import AnySource
from bough.model.checkpoint.checkpoint import TensorPlace
from bough.model.checkpoint.tensor_source import VALUE_DTYPES, Scratch, room_bytes


class QuantFormat(ABC):
    """How a checkpoint's weights are packed, according to its config.json."""

    __slots__ = ()
    method: ClassVar[str]  # its `quant_method`
    bits: int  # of every weight; 0 if they differ
    is_transposed: ClassVar[bool] = False  # values are transposes of contiguous matrices
    spare: ClassVar[tuple[str, ...]] = ()  # endings of names of tensors that say nothing of weights and are not read
    note: str = ""  # what the configuration asks for and is not done

    def __str__(self) -> str:
        return f"{self.bits or 'mixed'} bits ({self.method})"

    @classmethod
    @abstractmethod
    def of(cls, fields: Mapping[str, Any], where: str) -> QuantFormat:
        """Read `quantization_config`, which is at `where`. Raises CheckpointError for unsupported variants."""

    @abstractmethod
    def weight_name(self, place: TensorPlace) -> str | None:
        """The weight whose numbers a tensor has; None for other tensors."""

    @abstractmethod
    def source(self, tensor: str, tensors: PackedTensors) -> AnySource:
        """Take the tensors of a weight whose numbers are `tensor`. Raises CheckpointError."""


@dataclass(frozen=True, slots=True)
class Dequantized(ABC):
    """A weight whose value is a whole matrix in scratch memory. Subclasses say from which tensors, and how."""

    is_transposed: ClassVar[bool] = False  # the value is the transpose of a contiguous matrix

    @property
    def places(self) -> tuple[TensorPlace, ...]:
        """The tensors that the value is made from: those of the weight's fields that are tensors, in order."""
        values = (getattr(self, field.name) for field in fields(self))
        return tuple(value for value in values if isinstance(value, TensorPlace))

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""

    @abstractmethod
    def _write(self, raw: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Dequantize to the contiguous matrix `out`."""

    def scratch_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the whole value."""
        return room_bytes(self.shape, dtype)

    def value(self, raw: Sequence[torch.Tensor], dtype: torch.dtype, scratch: Scratch) -> torch.Tensor:
        """Dequantize."""
        out = scratch.take(self.shape[::-1] if self.is_transposed else self.shape, dtype)
        scratch.write(lambda: self._write(raw, out))
        return out.t() if self.is_transposed else out


class WordsFormat(QuantFormat):
    """GPTQ or AWQ: the integers of a transposed X.weight are "X.qweight", packed in words of 32 bits."""

    __slots__ = ()
    is_transposed = True

    def weight_name(self, place: TensorPlace) -> str | None:
        return place.name.removesuffix(".qweight") + ".weight" if place.name.endswith(".qweight") else None

    @staticmethod
    def _take(tensor: str, tensors: PackedTensors) -> tuple[TensorPlace, TensorPlace, TensorPlace]:
        """Take integers, zeros and scales. Raises CheckpointError."""
        base, integers = tensor.removesuffix(".qweight"), tensors.take(tensor, ("I32",))
        zeros = tensors.take(f"{base}.qzeros", ("I32",), integers)
        scales = tensors.take(f"{base}.scales", VALUE_DTYPES, integers)
        require_matrix(integers)
        return integers, zeros, scales


class PackedTensors:
    """Tensors of a checkpoint that no weight has taken yet."""

    def __init__(self, remaining: dict[str, TensorPlace]) -> None:
        """Taken tensors are removed from `remaining`."""
        self._remaining = remaining

    def __contains__(self, name: object) -> bool:
        return name in self._remaining

    def take(self, name: str, dtypes: Collection[str], beside: TensorPlace | None = None) -> TensorPlace:
        """Take one of the tensors of a weight whose numbers are `beside`.

        Raises:
            CheckpointError: it is missing, or has another dtype.
        """
        place = self._remaining.pop(name, None)
        if place is None:
            assert beside is not None, "numbers are there: they are what is asked for first"
            raise CheckpointError(f"{beside.file}: tensor {name}, which belongs to {beside.name}, is missing")
        if place.dtype not in dtypes:
            raise CheckpointError(f"{place.file}: tensor {name} must be {' or '.join(dtypes)}, got {place.dtype}")
        return place


def bits_of(fields: Mapping[str, Any], where: str, allowed: Collection[int]) -> int:
    """The number of bits of a weight. Raises CheckpointError if it is not in `allowed`."""
    named = fields.get("bits") or fields.get("w_bit") or 0
    bits = int(named) if str(named).isdecimal() else named
    if bits not in allowed:
        raise CheckpointError(f"{where}.bits: must be {' or '.join(map(str, allowed))}, got {bits}")
    return int(bits)


def kept_modules(fields: Mapping[str, Any], where: str, *names: str) -> tuple[str, ...]:
    """The modules that stay unquantized, by the first field of these `names` that is there. Raises CheckpointError."""
    name = next((name for name in names if fields.get(name)), names[0])
    return module_names(fields.get(name) or (), f"{where}.{name}")


def module_names(found: object, where: str) -> tuple[str, ...]:
    """The modules that a field at `where` lists. Raises CheckpointError for anything but a list of names."""
    if not isinstance(found, list | tuple) or not all(isinstance(name, str) for name in found):
        raise CheckpointError(f"{where}: must be a list of modules, got {found!r}")
    return tuple(found)


def require_matrix(place: TensorPlace) -> None:
    if len(place.shape) != 2:
        raise CheckpointError(f"{place.file}: tensor {place.name} must be a matrix, got shape {list(place.shape)}")


def require_shape(place: TensorPlace, shape: tuple[int, ...]) -> None:
    """Check a shape, which kernels rely on."""
    if place.shape != shape:
        raise CheckpointError(
            f"{place.file}: tensor {place.name} must have shape {list(shape)}, got {list(place.shape)}"
        )


def require_groups(scales: TensorPlace, inputs: int, num_groups: int) -> None:
    if num_groups < 1 or inputs % num_groups:
        raise CheckpointError(
            f"{scales.file}: tensor {scales.name} must have groups of equal size for {inputs} inputs, "
            f"got shape {list(scales.shape)}"
        )


def read_integers(place: TensorPlace) -> np.ndarray[Any, Any]:
    """A small tensor of integers, read from its file.

    Raises:
        CheckpointError: it cannot be read.
    """
    dtype = np.int64 if place.dtype == "I64" else np.int32
    try:
        numbers = np.fromfile(place.file, dtype, place.num_bytes // dtype().itemsize, offset=place.offset)
    except OSError as exc:
        raise CheckpointError(f"{place.file}: tensor {place.name} cannot be read: {exc}") from exc
    if numbers.nbytes < place.num_bytes:
        count = place.num_bytes // dtype().itemsize
        raise CheckpointError(f"{place.file}: tensor {place.name} ends after {len(numbers)} of {count}")
    return numbers


def unless_in_order(groups: TensorPlace, num_groups: int) -> TensorPlace | None:
    """None if the group indices are those of consecutive groups of equal size, which need no lookup.

    Raises:
        CheckpointError: the indices cannot be read, or are out of range.
    """
    numbers = read_integers(groups)
    wrong = numbers[(numbers < 0) | (numbers >= num_groups)]
    if len(wrong):
        raise CheckpointError(
            f"{groups.file}: tensor {groups.name}: groups must be 0 to {num_groups - 1}, got {wrong[0]}"
        )
    if num_groups < 1 or len(numbers) % num_groups:
        return groups
    in_order = np.arange(len(numbers)) // (len(numbers) // num_groups)
    return None if np.array_equal(numbers, in_order) else groups


def write_out(out: torch.Tensor, kernel: Callable[..., None], *inputs: object) -> None:
    """Fill a matrix on the CPU by a kernel, which writes its numbers by `put_number`."""
    target = out.view(torch.int16).numpy() if out.dtype == torch.float16 else _array(out)
    kernel(*(_array(x) if isinstance(x, torch.Tensor) else x for x in inputs), target)


def _array(values: torch.Tensor) -> np.ndarray[Any, Any]:
    """The tensor for kernels, which read 16 bits as such."""
    return (values.view(torch.uint16) if values.dtype in (torch.float16, torch.bfloat16) else values).numpy()
