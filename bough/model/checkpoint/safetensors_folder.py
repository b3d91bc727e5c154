"""Model folders of the Hugging Face format: config.json, safetensors with their headers, a tokenizer. Uses no torch."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bough.errors import CheckpointError, InvalidModel
from bough.model.checkpoint.container import TensorPlace
from bough.tokenization.vocabulary import TokenizerFiles

if TYPE_CHECKING:
    from transformers import PretrainedConfig

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # limit of the safetensors library
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "F8_E4M3": 1, "F8_E8M0": 1, "BOOL": 1}
ITEM_BYTES |= {"I8": 1, "U8": 1, "I16": 2, "I32": 4, "I64": 8}
SNAPSHOTS = "snapshots"  # folder of the Hugging Face cache that has models
WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
UNWANTED = ["original/*", "consolidated*"]  # the same weights in their publishers' formats


@dataclass(frozen=True, slots=True)
class SafetensorsFolder:
    """A container that is a folder."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config_place(self) -> Path:
        return self.path / "config.json"

    @staticmethod
    def is_hub_id(spelling: str) -> bool:
        """Whether it is "organisation/name"."""
        return spelling.count("/") == 1

    def exists(self) -> bool:
        return self.path.is_dir()

    def from_hub(self, **how: Any) -> str:
        from huggingface_hub import snapshot_download

        found: str = snapshot_download(str(self.path), **how, allow_patterns=WANTED, ignore_patterns=UNWANTED)
        return found

    def tensors(self) -> dict[str, TensorPlace]:
        """Tensors of all files; for a tensor in several files the index decides."""
        folder = self.path
        if not self.config_place.is_file():
            raise InvalidModel("model", "must be a Hugging Face model folder", f"{folder}, which has no config.json")
        index = folder / INDEX_NAME
        files = _weight_map(index) if index.is_file() else {}
        headers = {name: read_header(folder / name) for name in _shards(folder, set(files.values()) or {SINGLE_NAME})}
        for name, file in files.items():
            if name not in headers[file]:
                raise CheckpointError(f"{folder / file}: tensor {name}, which {INDEX_NAME} places there, is missing")
        tensors = {name: place for header in headers.values() for name, place in header.items()}
        return tensors | {name: headers[file][name] for name, file in files.items()}

    def config(self) -> dict[str, Any]:
        found = json.loads(self.description())
        if not isinstance(found, dict):
            raise CheckpointError(f"{self.config_place}: must be an object, got {found!r}")
        return found

    def model_config(self) -> PretrainedConfig:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.path, trust_remote_code=False)  # type: ignore[no-any-return]

    def description(self) -> bytes:
        """The fields of config.json."""
        return self.config_place.read_bytes()

    def tokenizer_files(self) -> TokenizerFiles:
        """The tokenizer by transformers, which converts many formats."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.path, trust_remote_code=False)
        eos: set[int] = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
        given = tokenizer.chat_template  # one, or several by name
        templates = given if isinstance(given, dict) else {"default": given or ""}
        return TokenizerFiles(
            tokenizer.backend_tokenizer.to_str().encode(),
            templates.get("default", ""),
            tuple(sorted(eos | _configured_ends(self.path))),
            tokenizer.bos_token or "",
            tokenizer.eos_token or "",
            templates.get("tool_use", ""),
        )

    def tokens(self) -> Sequence[str]:
        """The tokens of tokenizer.json."""
        return TokenizerFiles((self.path / "tokenizer.json").read_bytes(), "", ()).vocabulary


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


def _configured_ends(folder: Path) -> set[int]:
    """Ends of a text by generation_config.json, which is optional."""
    from transformers import GenerationConfig

    try:
        configured = GenerationConfig.from_pretrained(folder).eos_token_id
    except OSError:
        return set()
    return set(configured if isinstance(configured, list) else [configured]) - {None}
