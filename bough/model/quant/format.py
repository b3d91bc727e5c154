"""The common part of quantized formats.

In every format a weight is (number - zero point) * scale of its group, computed in float32 and rounded to the compute
dtype. A packed model thus gives the same bits as the same model stored dequantized. A format is one file, and a line
in `formats.py`. It recognises and reads a configuration, takes a weight's tensors, dequantizes them, and has samples
for checks and measurements. Sizes are those of the tensors.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import PretrainedConfig

from bough.errors import CheckpointError
from bough.model.architecture.moe import AnySource
from bough.model.backend import backend_of
from bough.model.checkpoint.container import TensorPlace
from bough.model.checkpoint.tensor_source import STORED_DTYPES, VALUE_DTYPES, Scratch, is_aligned, room_bytes
from bough.model.packed import Packed

# Name prefixes in a model that contains a language model, and in the language model alone.
PARTS = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
SAMPLE_GROUP = 128  # inputs that share a scale in most public checkpoints
E4M3_NAN = 0x7F


class WeightFormat(ABC):
    """How a checkpoint's weights are packed, according to its config.json."""

    __slots__ = ()
    method: ClassVar[str]  # its `quant_method`
    bits: int  # of every weight; 0 if they differ
    is_transposed: ClassVar[bool] = False  # values are transposes of contiguous matrices
    spare: ClassVar[tuple[str, ...]] = ()  # suffixes of names of tensors that do not belong to weights and are not read
    note: str = ""  # parts of the configuration that are ignored
    # Sample matrices (outputs, inputs) without a file, by the name of each layout with its own dequantization.
    samples: ClassVar[Mapping[str, Callable[[int, int], Dequantized]]] = {}

    def __str__(self) -> str:
        return f"{self.bits or 'mixed'} bits ({self.method})"

    @classmethod
    def found(cls, config: PretrainedConfig, path: Path) -> tuple[Mapping[str, Any], str] | None:
        """The configuration of this format in a model folder or file, and its place for error messages; None if the
        model has another format.
        """
        fields = quantization_fields(config)
        is_this = str(fields.get("quant_method", "")) == cls.method
        return (fields, f"{path / 'config.json'}: quantization_config") if is_this else None

    @classmethod
    @abstractmethod
    def of(cls, fields: Mapping[str, Any], where: str) -> WeightFormat:
        """Read `quantization_config`, which is at `where`. Raises CheckpointError for unsupported variants."""

    @abstractmethod
    def weight_name(self, place: TensorPlace) -> str | None:
        """The weight whose numbers a tensor has; None for other tensors."""

    @abstractmethod
    def source(self, tensor: str, tensors: PackedTensors) -> AnySource:
        """Take the tensors of a weight whose numbers are `tensor`. Raises CheckpointError."""

    def named(self, sources: Mapping[str, AnySource], parameters: Collection[str]) -> dict[str, AnySource]:
        """A checkpoint's values by their names in the language model alone, whose parameters are given."""
        return in_language_model(sources)


@dataclass(frozen=True, slots=True)
class Dequantized(ABC):
    """A weight whose value is a whole matrix in scratch memory. Subclasses define its tensors and dequantization."""

    is_transposed: ClassVar[bool] = False  # the value is the transpose of a contiguous matrix
    is_packed: ClassVar[bool] = True  # fewer bits are stored than used in computation

    @property
    def places(self) -> tuple[TensorPlace, ...]:
        """The tensors that the value is made from: those of the weight's fields that are tensors, in order."""
        values = (getattr(self, field.name) for field in fields(self))
        return tuple(value for value in values if isinstance(value, TensorPlace))

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""

    def packed(self, raw: Sequence[torch.Tensor]) -> Packed:
        """The matrix in its layout, from the bytes of `places`; only if it `is_packed`."""
        raise NotImplementedError

    def as_stored(self, raw: Sequence[torch.Tensor], dtype: torch.dtype) -> Packed | None:
        """The matrix in its layout, in views of the bytes; None if it must be made."""
        return self.packed(raw) if self.is_packed and all(map(is_aligned, self.places)) else None

    def _write(self, raw: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Dequantize to the matrix `out`."""
        backend_of(out.device).write(self.packed(raw), out)

    @property
    def order(self) -> tuple[TensorPlace | None, int]:
        """The tensor with each input's group, None if groups are consecutive, and the number of groups."""
        return None, 0

    def random(self, rng: np.random.Generator) -> list[torch.Tensor]:
        """Random valid bytes of `places`, each (num_bytes,) uint8."""
        groups, num_groups = self.order
        return [_random_bytes(place, rng, num_groups if place is groups else None) for place in self.places]

    def scratch_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the whole value."""
        return room_bytes(self.shape, dtype)

    def value(self, raw: Sequence[torch.Tensor], dtype: torch.dtype, scratch: Scratch) -> torch.Tensor:
        """Dequantize."""
        out = scratch.take(self.shape[::-1] if self.is_transposed else self.shape, dtype)
        whole = out.t() if self.is_transposed else out
        scratch.write(lambda: self._write(raw, whole))
        return whole


class WordsFormat(WeightFormat):
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

    def __init__(self, remaining: dict[str, TensorPlace], has_data: bool = True) -> None:
        """Taken tensors are removed from `remaining`. Without data, only headers are available."""
        self._remaining, self._has_data = remaining, has_data

    def __contains__(self, name: object) -> bool:
        return name in self._remaining

    def take(self, name: str, dtypes: Collection[str], numbers: TensorPlace | None = None) -> TensorPlace:
        """Take a tensor of a weight; `numbers` are the weight's own, or None while they are taken.

        Raises:
            CheckpointError: it is missing, or has another dtype.
        """
        place = self._remaining.pop(name, None)
        if place is None:
            assert numbers is not None, "numbers are taken first"
            raise CheckpointError(f"{numbers.file}: tensor {name}, which belongs to {numbers.name}, is missing")
        if place.dtype not in dtypes:
            raise CheckpointError(f"{place.file}: tensor {name} must be {' or '.join(dtypes)}, got {place.dtype}")
        return place

    def integers(self, place: TensorPlace) -> np.ndarray[Any, Any] | None:
        """A small tensor of integers, read from its file; None without data.

        Raises:
            CheckpointError: it cannot be read.
        """
        return read_integers(place) if self._has_data else None

    def unless_in_order(self, groups: TensorPlace, num_groups: int) -> TensorPlace | None:
        """None if the group indices are those of consecutive groups of equal size, which need no lookup.

        Without data they are assumed to be.

        Raises:
            CheckpointError: the indices cannot be read, or are out of range.
        """
        numbers = self.integers(groups)
        if numbers is None:
            return None
        wrong = numbers[(numbers < 0) | (numbers >= num_groups)]
        if len(wrong):
            raise CheckpointError(
                f"{groups.file}: tensor {groups.name}: groups must be 0 to {num_groups - 1}, got {wrong[0]}"
            )
        if num_groups < 1 or len(numbers) % num_groups:
            return groups
        in_order = np.arange(len(numbers)) // (len(numbers) // num_groups)
        return None if np.array_equal(numbers, in_order) else groups


def quantization_fields(config: PretrainedConfig) -> dict[str, Any]:
    """The fields of `quantization_config`; none if weights have 16 or 32 bits."""
    entry = getattr(config, "quantization_config", None) or {}
    return entry if isinstance(entry, dict) else dict(entry.to_dict())


def in_language_model(sources: Mapping[str, AnySource]) -> dict[str, AnySource]:
    """Values by their names in the language model alone, for models with other parts."""
    return {_own_name(name): source for name, source in sources.items()}


def _own_name(name: str) -> str:
    of_part = next((beginning for beginning in PARTS if name.startswith(beginning)), None)
    return name if of_part is None else PARTS[of_part] + name.removeprefix(of_part)


def place_of(dtype: str, *shape: int) -> TensorPlace:
    """A tensor without a file, for samples."""
    num_bytes = math.prod(shape) * STORED_DTYPES[dtype].itemsize
    return TensorPlace("", Path(), 0, num_bytes, dtype, shape)


def _random_bytes(place: TensorPlace, rng: np.random.Generator, num_groups: int | None) -> torch.Tensor:
    """Bytes of a tensor: groups of a number, numbers of any bits, or scales near 0.005."""
    if num_groups is not None:
        groups = np.arange(place.shape[0]) * num_groups // place.shape[0]
        return torch.from_numpy(rng.permutation(groups).astype(np.int32)).view(torch.uint8)
    if place.dtype in VALUE_DTYPES:
        scales = torch.from_numpy(rng.uniform(0.001, 0.01, place.shape).astype(np.float32))
        return scales.to(STORED_DTYPES[place.dtype]).flatten().view(torch.uint8)
    low, high = (112, 127) if place.dtype == "F8_E8M0" else (0, 256)
    numbers = rng.integers(low, high, place.num_bytes, np.uint8)
    if place.dtype == "F8_E4M3":
        numbers[numbers & E4M3_NAN == E4M3_NAN] = 0
    return torch.from_numpy(numbers)


def bits_of(fields: Mapping[str, Any], where: str, allowed: Collection[int]) -> int:
    """The number of bits of a weight. Raises CheckpointError if it is not in `allowed`."""
    named = fields.get("bits") or fields.get("w_bit") or 0
    bits = int(named) if str(named).isdecimal() else named
    if bits not in allowed:
        raise CheckpointError(f"{where}.bits: must be {' or '.join(map(str, allowed))}, got {bits}")
    return int(bits)


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
