"""Hashes samples of a checkpoint's tensors, to tell apart checkpoints of one training run, whose headers are equal.

Training changes nearly every number of a tensor, so a few samples suffice. Their number is limited, so that starts stay
fast, and their places follow from the tensor's name, so that they are the same on every machine. This module uses no
torch and no checkpoint folders.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
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


def samples_digest(tensors: Iterable[TensorPlace], num_samples: int = NUM_SAMPLES) -> str:
    """Hash of `num_samples` samples, at least one of every tensor, independent of the order of tensors.

    Raises:
        CheckpointError: a file cannot be read, or is too short.
    """
    ordered = sorted(tensors, key=lambda tensor: (tensor.name, str(tensor.file)))
    num_each = max(1, num_samples // max(1, len(ordered)))
    samples = [sample for tensor in ordered for sample in samples_of(tensor, num_each)]
    digest = hashlib.blake2b(digest_size=16)
    for data in _read_all(samples):
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


def _read_all(samples: Sequence[Sample]) -> Iterable[bytes]:
    """Yield the bytes of all samples in order. Each thread reads its samples in the order of their places."""
    size = max(1, -(-len(samples) // NUM_THREADS))
    parts = [samples[begin : begin + size] for begin in range(0, len(samples), size)]
    with ExitStack() as stack, ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="samples") as threads:
        descriptors: dict[Path, int] = {}
        for sample in samples:
            if sample.file not in descriptors:
                descriptors[sample.file] = _open(sample, stack)
        for part in threads.map(lambda part: _read(part, descriptors), parts):
            yield from part


def _open(sample: Sample, stack: ExitStack) -> int:
    """Open a descriptor without read-ahead, closed with the stack."""
    try:
        descriptor = os.open(sample.file, os.O_RDONLY)
    except OSError as exc:
        raise CheckpointError(f"{sample.file}: tensor {sample.name} cannot be read: {exc}") from exc
    stack.callback(os.close, descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    return descriptor


def _read(samples: Sequence[Sample], descriptors: Mapping[Path, int]) -> list[bytes]:
    found: dict[Sample, bytes] = {}
    for sample in sorted(samples, key=lambda sample: (str(sample.file), sample.offset)):
        try:
            found[sample] = os.pread(descriptors[sample.file], sample.num_bytes, sample.offset)
        except OSError as exc:
            raise CheckpointError(f"{sample.file}: tensor {sample.name} cannot be read: {exc}") from exc
        if len(found[sample]) < sample.num_bytes:
            raise CheckpointError(f"{sample.file}: ends within tensor {sample.name}; the file is truncated")
    return [found[sample] for sample in samples]
