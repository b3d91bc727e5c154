"""Where each tensor of a checkpoint is: a model folder and its safetensors headers, or a GGUF file.

This module uses no torch and no model classes. `bough.model.loading.loading` checks shapes against the architecture.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bough.errors import CheckpointError
from bough.model.checkpoint.content_samples import samples_digest
from bough.model.checkpoint.gguf_file import is_gguf, read_gguf
from bough.model.checkpoint.hub import cached, is_hub_id

if TYPE_CHECKING:
    from huggingface_hub.utils._safetensors import TensorInfo

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # limit of the safetensors library
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "F8_E4M3": 1, "F8_E8M0": 1, "BOOL": 1}
ITEM_BYTES |= {"I8": 1, "U8": 1, "I16": 2, "I32": 4, "I64": 8}
SNAPSHOTS = "snapshots"  # folder of the Hugging Face cache that has models


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor's location: `num_bytes` at `offset` of `file`."""

    name: str
    file: Path
    offset: int
    num_bytes: int
    dtype: str  # in safetensors' notation: "BF16", "F32", ..., or in GGUF's: "Q4_K", ...
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model with consistent headers."""

    path: Path  # a folder, or a GGUF file
    tensors: dict[str, TensorPlace]
    has_data: bool = True  # False where only headers were fetched

    @classmethod
    def headers_of_hub(cls, model: str, folder: Path) -> Checkpoint:
        """The headers of a hub id, fetched by range requests; `folder` has its config.json.

        Raises:
            CheckpointError: they cannot be fetched, or its weights are not in safetensors.
        """
        from huggingface_hub import get_safetensors_metadata
        from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

        try:
            files = get_safetensors_metadata(model).files_metadata
        except (NotASafetensorsRepoError, SafetensorsParsingError, OSError) as exc:
            reason = (str(exc).strip() or repr(exc)).splitlines()[0]
            raise CheckpointError(f"model: headers of {model} cannot be fetched: {reason}") from exc
        tensors = {
            name: _fetched(folder / file, name, info)
            for file, header in files.items()
            for name, info in header.tensors.items()
        }
        return cls(folder, tensors, has_data=False)

    @classmethod
    def open(cls, model: str | Path) -> Checkpoint:
        """Read the headers of a local folder, of a GGUF file, or of a hub id in the local cache.

        Raises:
            CheckpointError: names a folder or file that is missing, truncated or malformed.
        """
        folder = resolve(model)
        if is_gguf(folder):
            return cls(folder, {name: TensorPlace(*tensor) for name, tensor in read_gguf(folder).tensors.items()})
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"model: must be a Hugging Face model folder, got {folder}, which has no config.json")
        return cls(folder, _tensors(folder))

    @property
    def name(self) -> str:
        """The name of the folder or file."""
        return self.path.stem if is_gguf(self.path) else self.path.name

    def fingerprint(self) -> str:
        """Hash of the configuration, places and shapes of all tensors, and their contents; the same on every machine.

        Contents are covered by samples of every tensor (`bough.model.checkpoint.content_samples`).

        Raises:
            CheckpointError: the samples cannot be read.
        """
        digest = hashlib.blake2b(self._description(), digest_size=12)
        for name, place in sorted(self.tensors.items()):
            digest.update(f"{name} {place.offset} {place.num_bytes} {place.dtype} {place.shape}\n".encode())
        digest.update(samples_digest(self.tensors.values()).encode())
        return digest.hexdigest()

    def _description(self) -> bytes:
        """The configuration: config.json, or what stands before a GGUF file's weights."""
        if not is_gguf(self.path):
            return (self.path / "config.json").read_bytes()
        with self.path.open("rb") as stream:
            return stream.read(read_gguf(self.path).num_bytes)


def resolve(model: str | Path) -> Path:
    """The folder or GGUF file of a model: a local one itself, or that of a hub id in the cache."""
    path = Path(model).expanduser()
    if path.is_dir() or (is_gguf(path) and path.is_file()):
        return path
    if not is_hub_id(model):
        raise CheckpointError(f"model: must be a folder or a GGUF file that exists, or a hub id, got {model}")
    return cached(str(model))


def read_header(file: Path) -> dict[str, TensorPlace]:
    """The tensors of one safetensors file, checked against the file's size."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            if len(prefix) < 8:
                raise CheckpointError(f"{file}: {size} bytes are too few for a safetensors file; it is truncated")
            (header_bytes,) = struct.unpack("<Q", prefix)
            if header_bytes > min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(f"{file}: header of {header_bytes} bytes in a file of {size}; it is truncated")
            header: dict[str, Any] = dict(json.loads(stream.read(header_bytes)))
    except OSError as exc:
        raise CheckpointError(f"{file}: cannot be read: {exc}") from exc
    except (ValueError, TypeError, RecursionError) as exc:
        raise CheckpointError(f"{file}: header is not a JSON object: {exc}") from exc
    data_start = 8 + header_bytes
    header.pop("__metadata__", None)
    return {name: _place(file, size, data_start, name, entry) for name, entry in header.items()}


def _fetched(file: Path, name: str, info: TensorInfo) -> TensorPlace:
    begin, end = info.data_offsets
    return TensorPlace(name, file, begin, end - begin, info.dtype, tuple(info.shape))


def _place(file: Path, size: int, data_start: int, name: str, entry: dict[str, Any]) -> TensorPlace:
    try:
        begin, end = (int(offset) for offset in entry["data_offsets"])
        dtype, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
    except (KeyError, TypeError, ValueError, OverflowError) as exc:
        raise CheckpointError(f"{file}: header entry of {name} is malformed: {entry!r}") from exc
    if min(shape, default=0) < 0:
        raise CheckpointError(f"{file}: tensor {name} must have no negative dimension, got shape {list(shape)}")
    if not 0 <= begin <= end or data_start + end > size:
        raise CheckpointError(
            f"{file}: tensor {name} ends at byte {data_start + end} of a file of {size}; the file is truncated"
        )
    item_bytes = ITEM_BYTES.get(dtype)
    if item_bytes is not None and end - begin != math.prod(shape) * item_bytes:
        raise CheckpointError(
            f"{file}: tensor {name} has {end - begin} bytes, but {dtype} of shape {list(shape)} takes "
            f"{math.prod(shape) * item_bytes}"
        )
    return TensorPlace(name, file, data_start + begin, end - begin, dtype, shape)


def _tensors(folder: Path) -> dict[str, TensorPlace]:
    """Tensors of all files; one that several files have is where the index says."""
    index = folder / INDEX_NAME
    files = _weight_map(index) if index.is_file() else {}
    headers = {name: read_header(folder / name) for name in _shards(folder, set(files.values()) or {SINGLE_NAME})}
    for name, file in files.items():
        if name not in headers[file]:
            raise CheckpointError(f"{folder / file}: tensor {name}, which {INDEX_NAME} places there, is missing")
    tensors = {name: place for header in headers.values() for name, place in header.items()}
    return tensors | {name: headers[file][name] for name, file in files.items()}


def _shards(folder: Path, names: Collection[str]) -> list[str]:
    """File names in order, all of which must exist."""
    for name in sorted(names):
        if not (folder / name).is_file():
            is_cached = folder.parent.name == SNAPSHOTS
            remedy = "; fetch the whole model with `hf download`" if is_cached else ""
            raise CheckpointError(f"{folder / name}: this file of the checkpoint is missing{remedy}")
    return sorted(names)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        names = dict(json.loads(index.read_text())["weight_map"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as exc:
        raise CheckpointError(f"{index}: not an index of safetensors files: {exc!r}") from exc
    for name, file in names.items():
        if not isinstance(file, str) or not file:
            raise CheckpointError(f"{index}: tensor {name}: must be placed in a file, got {file!r}")
        if Path(file).is_absolute() or ".." in Path(file).parts:
            raise CheckpointError(f"{index}: tensor {name}: must be placed in a file of the same folder, got {file!r}")
    return names
