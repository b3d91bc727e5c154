"""Headers of GGUF files, the format of llama.cpp: their fields, and where each tensor is. Uses no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bough.errors import CheckpointError

if TYPE_CHECKING:
    from gguf import GGUFReader

SUFFIX, MAGIC, VERSIONS = ".gguf", b"GGUF", (2, 3)
MOST_VERSION = 1 << 16  # beyond which it is a small number with its bytes in the other order
PLAIN = {"F32": 4, "F16": 2, "BF16": 2}  # types of single numbers, and their bytes
BLOCKS = {  # types of blocks: numbers and bytes of a block
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
}  # fmt: skip
OF_SEVERAL = re.compile(r"-00001-of-(\d{5})\.gguf$")


class GgufTensor(NamedTuple):
    """A tensor of a file."""

    name: str
    file: Path
    offset: int  # in bytes
    num_bytes: int
    dtype: str  # a type of PLAIN or BLOCKS
    shape: tuple[int, ...]  # of numbers; the last axis is contiguous


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What stands before the weights."""

    file: Path  # the first, if a model is split
    fields: Mapping[str, Any]  # by key, without the lists of tokenizers
    tensors: Mapping[str, GgufTensor]  # of all files
    num_bytes: int  # of the first file before its weights

    def field(self, key: str, kind: type, default: Any = None) -> Any:
        """A field of the architecture, such as "block_count"; numbers are not negative.

        Raises:
            CheckpointError: it is of another type, or is missing and has no default.
        """
        name = f"{self.fields['general.architecture']}.{key}"
        found = self.fields.get(name, default)
        if not isinstance(found, kind) or (isinstance(found, int | float) and found < 0):
            wanted = {int: "a whole number", float: "a number"}.get(kind, "a text")
            raise self.refusal(f"field {name} must be {wanted}, got {found!r}")
        return found

    def refusal(self, why: str) -> CheckpointError:
        """The error for a file that cannot be used."""
        return CheckpointError(f"{self.file}: {why}")


def is_gguf(path: str | Path) -> bool:
    """Whether a name is that of a GGUF file."""
    return str(path).endswith(SUFFIX)


def read_gguf(file: Path) -> GgufHeader:
    """The header of a file, or of all files of a split model whose first one it is.

    Raises:
        CheckpointError: a file is missing, damaged or truncated, or has tensors of unsupported types.
    """
    header = _kept(file)
    if not isinstance(header.fields.get("general.architecture"), str):
        raise header.refusal("has no field general.architecture")
    if (count := header.fields.get("split.count") or 1) > 1:
        parts = [_kept(part).tensors for part in _others(file, count)]
        return replace(header, tensors={name: each for part in (header.tensors, *parts) for name, each in part.items()})
    return header


def _kept(file: Path) -> GgufHeader:
    try:
        status = file.stat()
    except OSError as exc:
        raise CheckpointError(f"{file}: cannot be read: {exc}") from exc
    return _read(file, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=32)
def _read(file: Path, _mtime_ns: int, size: int) -> GgufHeader:
    """Kept, as a header with a large vocabulary takes a second."""
    reader = _opened(file)
    fields = {name: field.contents() for name, field in reader.fields.items() if not _is_list_of_tokens(name, field)}
    tensors = {tensor.name: tensor for tensor in _tensors(file, size, reader)}
    return GgufHeader(file, fields, tensors, int(reader.data_offset))


def _is_list_of_tokens(name: str, field: Any) -> bool:
    return name.startswith("tokenizer.") and len(field.types) > 1


def _opened(file: Path) -> GGUFReader:
    """Check what the file begins with, and parse its header."""
    from gguf import GGUFReader

    try:
        with file.open("rb") as stream:
            magic, version = stream.read(4), int.from_bytes(stream.read(4), "little")
        if magic != MAGIC:
            raise CheckpointError(f"{file}: must begin with {MAGIC!r}, as a GGUF file does, got {magic!r}")
        if version >= MOST_VERSION:
            raise CheckpointError(f"{file}: must have the bytes of its numbers in little-endian order, got big-endian")
        if version not in VERSIONS:
            raise CheckpointError(f"{file}: must be of version {' or '.join(map(str, VERSIONS))}, got {version}")
        return GGUFReader(file)
    except OSError as exc:
        raise CheckpointError(f"{file}: cannot be read: {exc}") from exc
    except (ValueError, LookupError, TypeError, OverflowError, MemoryError) as exc:
        raise CheckpointError(f"{file}: is truncated or damaged: {exc}") from exc


def _tensors(file: Path, size: int, reader: GGUFReader) -> list[GgufTensor]:
    tensors = []
    for each in reader.tensors:
        kind, shape = each.tensor_type.name, tuple(int(n) for n in reversed(each.shape))
        if kind not in PLAIN and kind not in BLOCKS:
            raise CheckpointError(
                f"{file}: tensor {each.name}: its type must be one of {', '.join((*PLAIN, *BLOCKS))}, got {kind}"
            )
        values, block_bytes = BLOCKS.get(kind) or (1, PLAIN[kind])
        if not shape or shape[-1] % values:
            raise CheckpointError(f"{file}: tensor {each.name}: {kind} must have rows of {values}, got {list(shape)}")
        num_bytes = math.prod(shape) // values * block_bytes
        if each.data_offset + num_bytes > size:
            raise CheckpointError(f"{file}: tensor {each.name} ends beyond the file's {size} bytes; it is truncated")
        tensors.append(GgufTensor(each.name, file, int(each.data_offset), num_bytes, kind, shape))
    return tensors


def _others(file: Path, count: int) -> list[Path]:
    """A split model's other files, which are beside the first."""
    found = OF_SEVERAL.search(file.name)
    if found is None or int(found[1]) != count:
        raise CheckpointError(
            f"{file}: is one of {count} files of a split model; must be the first one, named ...-00001-of-{count:05d}"
            f"{SUFFIX}, with the others beside it"
        )
    start = file.name[: found.start()]
    return [file.with_name(f"{start}-{number:05d}-of-{count:05d}{SUFFIX}") for number in range(2, count + 1)]
