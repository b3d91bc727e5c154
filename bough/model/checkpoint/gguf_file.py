"""Headers of GGUF files, the format of llama.cpp: their fields, and where each tensor is. Uses no torch."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, NamedTuple

from bough.errors import CheckpointError
from bough.model.checkpoint.container import TensorPlace

SUFFIX, MAGIC, VERSIONS = ".gguf", b"GGUF", (2, 3)
MOST_VERSION = 1 << 16  # a larger number is a small one with its bytes in the other order
PLAIN = {"F32": 4, "F16": 2, "BF16": 2}  # types of single numbers, and their bytes
BLOCKS = {  # types of blocks: numbers and bytes of a block
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
    "IQ4_NL": (32, 18), "IQ4_XS": (256, 136),
}  # fmt: skip
TEXT, LIST = 8, 9  # kinds of fields
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # others
MOST_LISTED, MOST_AXES = 1 << 16, 8  # elements of a list outside the tokenizer, and axes; models have far fewer
ALIGNMENT = 32  # weights begin at multiples of this many bytes, unless general.alignment is set
OF_SEVERAL = re.compile(r"(.*)-00001-of-(\d{5})\.gguf")


class ListPlace(NamedTuple):
    """The place of a list in a file."""

    offset: int  # of the kind of its elements
    length: int


class Cursor:
    """Reads the values of a header in order; struct.error or ValueError mean that the bytes end too early."""

    def __init__(self, data: mmap, at: int) -> None:
        """Begin at byte `at`."""
        self._data, self.at = data, at

    def number(self, code: str) -> Any:
        """A number of one of struct's formats."""
        (number,) = struct.unpack_from(f"<{code}", self._data, self.at)
        self.at += struct.calcsize(f"<{code}")
        return number

    def text(self) -> str:
        """A text, preceded by its length."""
        return self._texts(1)[0]

    def value(self, kind: int) -> Any:
        """A field of a kind: a number, a text, or a list."""
        if kind == LIST:
            return self.list_(MOST_LISTED)
        if kind != TEXT and kind not in NUMBERS:
            raise ValueError(f"kinds of fields must be 0 to 12, got {kind}")
        return self.text() if kind == TEXT else self.number(NUMBERS[kind])

    def list_(self, most: float = math.inf) -> list[Any]:
        """A list, of up to `most` elements."""
        kind, length = self._list_start()
        if length > most:
            raise ValueError(f"a list that is not of the tokenizer must have up to {most} elements, got {length}")
        if kind == TEXT:
            return self._texts(length)
        layout = f"<{self._fitting(kind, length)}{NUMBERS[kind]}"
        numbers = struct.unpack_from(layout, self._data, self.at)
        self.at += struct.calcsize(layout)
        return list(numbers)

    def skipped_list(self) -> ListPlace:
        """Skip a list, and return its place."""
        begin, (kind, length) = self.at, self._list_start()
        if kind in NUMBERS:
            self.at += self._fitting(kind, length) * struct.calcsize(f"<{NUMBERS[kind]}")
            return ListPlace(begin, length)
        data, at, size_at = self._data, self.at, struct.Struct("<Q").unpack_from
        for _ in range(length):
            at += 8 + size_at(data, at)[0]
        self.at = at
        return ListPlace(begin, length)

    def _texts(self, count: int) -> list[str]:
        data, at, size_at, texts = self._data, self.at, struct.Struct("<Q").unpack_from, list[str]()
        end = len(data)
        for _ in range(count):
            begin = at + 8
            at = begin + size_at(data, at)[0]
            if at > end:  # before the slice, which would copy the rest of the file
                raise ValueError("a text ends beyond the file")
            texts.append(data[begin:at].decode())
        self.at = at
        return texts

    def _list_start(self) -> tuple[int, int]:
        kind, length = self.number("I"), self.number("Q")
        if kind != TEXT and kind not in NUMBERS:
            raise ValueError(f"elements of lists must be texts or numbers, got kind {kind}")
        return kind, length

    def _fitting(self, kind: int, length: int) -> int:
        if length * struct.calcsize(f"<{NUMBERS[kind]}") > len(self._data) - self.at:
            raise ValueError(f"a list of {length} numbers ends beyond the file")
        return length


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header, before the weights."""

    file: Path  # the first, if a model is split
    fields: Mapping[str, Any]  # by key; a tokenizer's lists are ListPlaces
    tensors: Mapping[str, TensorPlace]  # of all files
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

    def list_of(self, key: str) -> list[Any]:
        """A list of the tokenizer, such as "tokenizer.ggml.tokens"; empty if the file has none."""
        place = self.fields.get(key)
        if not isinstance(place, ListPlace):
            return []
        with _checked(self.file) as data:
            return Cursor(data, place.offset).list_()

    def token_id(self, key: str, num_tokens: int) -> int | None:
        """A special token, such as "bos"; None if the file names none.

        Raises:
            CheckpointError: there is no such token.
        """
        name = f"tokenizer.ggml.{key}_token_id"
        found = self.fields.get(name)
        if found is not None and (type(found) is not int or not 0 <= found < num_tokens):
            raise self.refusal(f"field {name} must be 0 to {num_tokens - 1}, the tokens' numbers, got {found!r}")
        return found

    def refusal(self, why: str) -> CheckpointError:
        """The error for a file that cannot be used."""
        return CheckpointError(f"{self.file}: {why}")


def files_of(file: Path) -> list[Path]:
    """All files of a split model if this is the name of its first one; otherwise the file alone."""
    found = OF_SEVERAL.fullmatch(file.name)
    start, count = (found[1], int(found[2])) if found else ("", 1)
    return [file, *(file.with_name(f"{start}-{n:05d}-of-{count:05d}{SUFFIX}") for n in range(2, count + 1))]


def read_gguf(file: Path) -> GgufHeader:
    """The header of a file, or of all files of a split model whose first one it is.

    Raises:
        CheckpointError: a file is missing, damaged or truncated, or has tensors of unsupported types.
    """
    header = _cached_header(file)
    if not isinstance(header.fields.get("general.architecture"), str):
        raise header.refusal("has no field general.architecture")
    count = header.fields.get("split.count") or 1
    if not isinstance(count, int):
        raise header.refusal(f"field split.count must be a whole number, got {count!r}")
    if count != 1:
        if len(files := files_of(file)) != count:
            raise header.refusal(
                f"is one of {count} files of a split model; must be the first one, named ...-00001-of-{count:0>5}"
                f"{SUFFIX}, with the others next to it"
            )
        parts = [_cached_header(part).tensors for part in files[1:]]
        return replace(header, tensors={name: each for part in (header.tensors, *parts) for name, each in part.items()})
    return header


def _cached_header(file: Path) -> GgufHeader:
    try:
        status = file.stat()
    except OSError as exc:
        raise CheckpointError(f"{file}: cannot be read: {exc}") from exc
    return _read(file, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=32)
def _read(file: Path, _mtime_ns: int, _size: int) -> GgufHeader:
    """Cached, as a header with a large vocabulary takes tenths of a second."""
    with _checked(file) as data:
        cursor = Cursor(data, 8)
        num_tensors, num_fields = cursor.number("Q"), cursor.number("Q")
        fields = {}
        for _ in range(num_fields):
            name, kind = cursor.text(), cursor.number("I")
            is_long = name.startswith("tokenizer.") and kind == LIST
            fields[name] = cursor.skipped_list() if is_long else cursor.value(kind)
        stated = [_Stated.read(cursor) for _ in range(num_tensors)]
        alignment = fields.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"{file}: field general.alignment must be a whole number above 0, got {alignment!r}")
        begin = -(-cursor.at // alignment) * alignment
        tensors = {each.name: _placed(file, each, begin, len(data)) for each in stated}
    return GgufHeader(file, fields, tensors, begin)


@contextmanager
def _checked(file: Path) -> Iterator[mmap]:
    """A file's bytes, if it begins like a GGUF file; all other errors in the block become CheckpointError too."""
    try:
        with file.open("rb") as stream:
            magic, version = stream.read(4), int.from_bytes(stream.read(4), "little")
            if magic != MAGIC:
                raise CheckpointError(f"{file}: must begin with {MAGIC!r}, as a GGUF file does, got {magic!r}")
            if version >= MOST_VERSION:
                raise CheckpointError(
                    f"{file}: must have the bytes of its numbers in little-endian order, got big-endian"
                )
            if version not in VERSIONS:
                raise CheckpointError(f"{file}: must be of version {' or '.join(map(str, VERSIONS))}, got {version}")
            with mmap(stream.fileno(), 0, access=ACCESS_READ) as data:
                yield data
    except OSError as exc:
        raise CheckpointError(f"{file}: cannot be read: {exc}") from exc
    except (ValueError, LookupError, struct.error, OverflowError, MemoryError) as exc:
        raise CheckpointError(f"{file}: is truncated or damaged: {exc}") from exc


class _Stated(NamedTuple):
    """A header's entry of a tensor."""

    name: str
    shape: tuple[int, ...]
    kind: str  # the library's name of its type, or an unknown one's number
    offset: int  # from the beginning of the weights

    @classmethod
    def read(cls, cursor: Cursor) -> _Stated:
        """Read a header's entry of one tensor at the cursor."""
        from gguf import GGMLQuantizationType

        name = cursor.text()
        if (num_axes := cursor.number("I")) > MOST_AXES:
            raise ValueError(f"tensor {name} must have up to {MOST_AXES} axes, got {num_axes}")
        shape = tuple(reversed([cursor.number("Q") for _ in range(num_axes)]))
        number = cursor.number("I")
        known = number in GGMLQuantizationType.__members__.values()
        return cls(name, shape, GGMLQuantizationType(number).name if known else str(number), cursor.number("Q"))


def _placed(file: Path, stated: _Stated, begin: int, size: int) -> TensorPlace:
    name, shape, kind, offset = stated
    if kind not in PLAIN and kind not in BLOCKS:
        raise CheckpointError(
            f"{file}: tensor {name}: its type must be one of {', '.join((*PLAIN, *BLOCKS))}, got {kind}"
        )
    values, block_bytes = BLOCKS.get(kind) or (1, PLAIN[kind])
    if not shape or shape[-1] % values:
        raise CheckpointError(f"{file}: tensor {name}: {kind} must have rows of {values}, got {list(shape)}")
    num_bytes = math.prod(shape) // values * block_bytes
    if begin + offset + num_bytes > size:
        raise CheckpointError(f"{file}: tensor {name} ends beyond the file's {size} bytes; it is truncated")
    return TensorPlace(name, file, begin + offset, num_bytes, kind, shape)
