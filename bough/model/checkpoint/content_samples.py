"""Hashes samples of a checkpoint's tensors, to tell apart checkpoints of one training run, whose headers are equal.

Training changes nearly every number of a tensor, so a few samples suffice. Their number is limited, so that starts stay
fast, and their places follow from the tensor's name, so that they are the same on every machine. This module uses no
torch and no checkpoint folders.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bough.errors import CheckpointError

if TYPE_CHECKING:
    from bough.model.checkpoint.checkpoint import TensorPlace

SAMPLE_BYTES = 4096
NUM_SAMPLES = 2048  # of a checkpoint, but at least one of each tensor
NUM_THREADS = 8  # concurrent random reads


class Sample(NamedTuple):
    """A byte range of a tensor."""

    name: str  # of the tensor
    file: Path
    offset: int  # in the file
    num_bytes: int


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


def samples_of(tensor: TensorPlace, num: int) -> list[Sample]:
    """One sample in each of `num` equal sections of a tensor; a short tensor is one sample."""
    if tensor.num_bytes <= num * SAMPLE_BYTES:
        return [Sample(tensor.name, tensor.file, tensor.offset, tensor.num_bytes)]
    stretch, samples = tensor.num_bytes // num, []
    for index in range(num):
        chosen = hashlib.blake2b(f"{tensor.name} {index}".encode(), digest_size=8).digest()
        begin = index * stretch + int.from_bytes(chosen, "little") % (stretch - SAMPLE_BYTES + 1)
        samples.append(Sample(tensor.name, tensor.file, tensor.offset + begin, SAMPLE_BYTES))
    return samples


def _read(sample: Sample) -> bytes:
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
