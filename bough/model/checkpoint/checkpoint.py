"""Where each tensor of a checkpoint is: a model folder and its safetensors headers, or a GGUF file.

This module uses no torch and no model classes. `bough.model.loading.loading` checks shapes against the architecture.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bough.errors import CheckpointError, InvalidModel
from bough.model.checkpoint.container import TensorPlace
from bough.model.checkpoint.model_places import container_of, resolve

if TYPE_CHECKING:
    from huggingface_hub.utils._safetensors import TensorInfo

SAMPLE_BYTES = 4096
NUM_SAMPLES = 2048  # of a checkpoint, but at least one of each tensor
NUM_THREADS = 8  # concurrent random reads


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model with consistent headers."""

    path: Path  # a folder, or a GGUF file
    tensors: dict[str, TensorPlace]
    has_data: bool = True  # False if only headers were fetched

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
            raise InvalidModel("model", f"headers of {model} cannot be fetched: {reason}") from exc
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
        path = resolve(model)
        return cls(path, container_of(path).tensors())

    @property
    def name(self) -> str:
        """The name of the folder or file."""
        return container_of(self.path).name

    def fingerprint(self) -> str:
        """Hash of the configuration, places and shapes of all tensors, and their contents; the same on every machine.

        Samples of every tensor distinguish checkpoints of one training run, which have equal headers: training changes
        nearly every number, so a few samples suffice. Their number is limited, for fast starts.

        Raises:
            CheckpointError: the samples cannot be read.
        """
        digest = hashlib.blake2b(container_of(self.path).description(), digest_size=12)
        for name, place in sorted(self.tensors.items()):
            digest.update(f"{name} {place.offset} {place.num_bytes} {place.dtype} {place.shape}\n".encode())
        digest.update(samples_digest(self.tensors.values()).encode())
        return digest.hexdigest()


def _fetched(file: Path, name: str, info: TensorInfo) -> TensorPlace:
    begin, end = info.data_offsets
    return TensorPlace(name, file, begin, end - begin, info.dtype, tuple(info.shape))


def samples_digest(tensors: Iterable[TensorPlace]) -> str:
    """Hash of NUM_SAMPLES samples, at least one of every tensor, independent of the order of tensors.

    Raises:
        CheckpointError: a file cannot be read, or is too short.
    """
    ordered = sorted(tensors, key=lambda tensor: (tensor.name, str(tensor.file)))
    num_each = max(1, NUM_SAMPLES // max(1, len(ordered)))
    samples = [sample for tensor in ordered for sample in samples_of(tensor, num_each)]
    digest = hashlib.blake2b(digest_size=16)
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="samples") as threads:
        for data in threads.map(_read, samples):
            digest.update(data)
    return digest.hexdigest()


def samples_of(tensor: TensorPlace, num: int) -> list[TensorPlace]:
    """Byte ranges, one in each of `num` equal sections of a tensor; a short tensor is one."""
    if tensor.num_bytes <= num * SAMPLE_BYTES:
        return [tensor]
    stretch, samples = tensor.num_bytes // num, []
    for index in range(num):
        chosen = hashlib.blake2b(f"{tensor.name} {index}".encode(), digest_size=8).digest()
        begin = index * stretch + int.from_bytes(chosen, "little") % (stretch - SAMPLE_BYTES + 1)
        samples.append(replace(tensor, offset=tensor.offset + begin, num_bytes=SAMPLE_BYTES))
    return samples


def _read(sample: TensorPlace) -> bytes:
    """The bytes of a sample, without read-ahead."""
    try:
        with sample.file.open("rb", buffering=0) as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            data = os.pread(stream.fileno(), sample.num_bytes, sample.offset)
    except OSError as exc:
        raise CheckpointError(f"{sample.file}: tensor {sample.name} cannot be read: {exc}") from exc
    if len(data) < sample.num_bytes:
        raise CheckpointError(f"{sample.file}: ends within tensor {sample.name}; the file is truncated")
    return data
