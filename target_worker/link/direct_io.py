"""Reads a checkpoint's files, bypassing the page cache where the file system allows it."""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from bough.errors import CheckpointError, StreamError
from bough.model.checkpoint.checkpoint import MAX_HEADER_BYTES, TensorPlace
from bough.model.checkpoint.content_samples import SAMPLE_BYTES, Sample, samples_digest
from target_worker.link.file_digests import file_digest, known_digest
from target_worker.link.layer_extents import Extent, LayerExtents
from target_worker.link.open_files import SETTLED_SECONDS, FileState, OpenFile, open_file

logger = logging.getLogger(__name__)

PIECE_BYTES = 8 * 1024 * 1024  # of one read; smaller reads take more CPU time, which sweeps need as well

Allocate = Callable[[int], memoryview]  # takes a number of bytes, returns page-aligned memory


class ReadRange(NamedTuple):
    """A part of an extent that is read at once."""

    extent: Extent
    begin: int  # within the extent
    num_bytes: int


class Slab(NamedTuple):
    """Page-aligned memory that a layer is read into."""

    bytes: torch.Tensor  # (num_bytes,) uint8
    view: memoryview  # of the same memory, for system calls

    @classmethod
    def over(cls, memory: memoryview) -> Slab:
        """Wrap existing memory."""
        return cls(torch.frombuffer(memory, dtype=torch.uint8), memory)


class Disk:
    """The open files of a checkpoint."""

    def __init__(self, files: Iterable[Path], unchecked: Iterable[TensorPlace] = ()) -> None:
        """`unchecked` are tensors without checksums, compared by digest or samples when a file is replaced."""
        self._files = {file: open_file(file) for file in set(files)}
        self._unchecked: dict[Path, list[TensorPlace]] = {}
        for place in unchecked:
            self._unchecked.setdefault(place.file, []).append(place)
        self._states = {path: FileState.of(file.descriptor) for path, file in self._files.items()}
        self._layouts = {file: _layout_of(file) for file in self._files}
        self._contents = {file: self._contents_of(file) for file in self._files}

    @property
    def is_direct(self) -> bool:
        """Whether all reads bypass the page cache."""
        return all(file.is_direct for file in self._files.values())

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            os.close(file.descriptor)

    def require_unchanged(self) -> None:
        """Check after reads, before their data is used, that no file was written to in place.

        Raises:
            StreamError: a file was written to, so reads may have mixed two checkpoints.
        """
        for path, file in self._files.items():
            if FileState.of(file.descriptor) != self._states[path]:
                raise StreamError(f"{path}: was written to while the model is served; the sweep's data is discarded")

    def renew(self) -> set[Path]:
        """Continue with files that were rewritten or replaced, if their contents are the same; returns which.

        Descriptors keep their numbers, as readers store them.

        Raises:
            StreamError: a file now has another layout or other weights, or is not known to have the same weights: it
                may be
                overwritten in part.
        """
        renewed = set()
        for path, file in self._files.items():
            before, found = self._states[path], _state_of(path, file)
            if found == before:
                continue
            self._require_same(path, before, found)
            if found.inode != before.inode:
                new = open_file(path)
                os.dup2(new.descriptor, file.descriptor)
                os.close(new.descriptor)
                self._files[path] = new._replace(descriptor=file.descriptor)
            self._states[path] = found
            self.require_unchanged()
            renewed.add(path)
        return renewed

    def _require_same(self, path: Path, before: FileState, found: FileState) -> None:
        """Check that a changed file has the same contents. Raises StreamError.

        Tensors with checksums are verified when read. For others a digest decides if one is known; without one, samples
        decide, as they would for a target that starts now. Files are renamed only when complete; overwriting one in
        place changes its beginning first, and may go on until nobody has written to it for a while.
        """
        if found.size != before.size:
            raise StreamError(
                f"{path}: must have {before.size} bytes, as when the model was opened, got {found.size}; restore the "
                "file or restart"
            )
        if _layout_of(path) != self._layouts[path]:
            raise StreamError(
                f"{path}: must have the tensors and offsets that it had when the model was opened; "
                "restore the file or restart"
            )
        if path not in self._unchecked:
            return
        digest = known_digest(path, before)
        if digest is not None:
            if self._digest_of(path, found) != digest:
                raise StreamError(
                    f"{path}: has other bytes than when the model was opened, which sessions have used; "
                    "restore the file or restart"
                )
        elif self._contents_of(path) != self._contents[path]:
            raise StreamError(
                f"{path}: has other weights than when the model was opened, which sessions have used; "
                "restore the file or restart"
            )
        elif found.inode == before.inode and not found.is_settled():
            raise StreamError(
                f"{path}: was written to a moment ago; is used again if its weights are the same once nobody has "
                f"written to it for {SETTLED_SECONDS:g} s"
            )

    def _digest_of(self, path: Path, state: FileState) -> str:
        try:
            return known_digest(path, state) or file_digest(path, state)
        except CheckpointError as exc:
            raise StreamError(str(exc)) from exc

    def place_of(self, piece: ReadRange) -> tuple[int, int, int, int, int]:
        """Descriptor, offset, bytes, bytes that must exist in the file, and the offset in the layer's slab."""
        extent = piece.extent
        needed = min(piece.num_bytes, extent.needed_bytes - piece.begin)
        descriptor = self._files[extent.file].descriptor
        return descriptor, extent.offset + piece.begin, piece.num_bytes, needed, extent.slab_offset + piece.begin

    def read(self, piece: ReadRange, slab: Slab) -> None:
        """Read one range into a slab.

        Raises:
            ReadError: has the offset that could not be read.
        """
        descriptor, offset, num_bytes, needed, begin = self.place_of(piece)
        target, done = slab.view[begin : begin + num_bytes], 0
        while done < needed:
            count = _read_twice(descriptor, target[done:], offset + done)
            if count == 0:
                raise ReadError(offset + done, "the file ends here")
            done += count

    def _contents_of(self, file: Path) -> str:
        """Digest of two samples of each tensor without a checksum: its beginning, and another one."""
        places = self._unchecked.get(file, ())
        begins = [Sample(f"{p.name} begin", file, p.offset, min(SAMPLE_BYTES, p.num_bytes)) for p in places]
        try:
            return samples_digest([*places, *begins], num_samples=1)
        except CheckpointError as exc:
            raise StreamError(str(exc)) from exc

    def load(self, layers: Sequence[LayerExtents], slabs: Sequence[Slab], num_threads: int) -> None:
        """Read whole layers, with several reads in flight.

        Raises:
            StreamError: names the file, the layer and the tensor.
        """

        def read(job: tuple[LayerExtents, Slab, ReadRange]) -> None:
            layer, slab, piece = job
            try:
                self.read(piece, slab)
            except ReadError as exc:
                raise stream_error(exc, layer, piece.extent) from exc

        jobs = [(layer, slab, p) for layer, slab in zip(layers, slabs, strict=True) for p in cut(layer.extents)]
        with ThreadPoolExecutor(num_threads, thread_name_prefix="load") as threads:
            for _ in threads.map(read, jobs):
                pass


def _read_twice(descriptor: int, target: memoryview, offset: int) -> int:
    """Bytes read. A failed read is repeated once, as a transient error would cost a sweep of seconds."""
    try:
        return os.preadv(descriptor, [target], offset)
    except OSError as exc:
        logger.warning("a read failed and is tried again: %s", exc)
    try:
        return os.preadv(descriptor, [target], offset)
    except OSError as exc:
        raise ReadError(offset, str(exc)) from exc


class ReadError(Exception):
    """Bytes that could not be read."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(reason)
        self.offset = offset


def stream_error(error: ReadError, layer: LayerExtents, extent: Extent) -> StreamError:
    """The StreamError that names the file and tensor of a ReadError."""
    tensor = layer.tensor_at(extent.file, error.offset)
    return StreamError(f"{extent.file}: {layer.name}, tensor {tensor}, byte {error.offset}: {error}")


def cut(extents: Sequence[Extent]) -> list[ReadRange]:
    """Split extents into ranges of one read each."""
    return [
        ReadRange(extent, begin, min(PIECE_BYTES, extent.num_bytes - begin))
        for extent in extents
        for begin in range(0, extent.num_bytes, PIECE_BYTES)
    ]


def _state_of(path: Path, file: OpenFile) -> FileState:
    """State of the file at a path; of the open file if the path has none."""
    try:
        return FileState.of(path)
    except OSError:
        return FileState.of(file.descriptor)


def _layout_of(file: Path) -> int:
    """Checksum of the header, which changes if any tensor moves."""
    with file.open("rb") as stream:
        (num_bytes,) = struct.unpack("<Q", stream.read(8).ljust(8, b"\0"))
        return zlib.crc32(stream.read(min(num_bytes, MAX_HEADER_BYTES)))
