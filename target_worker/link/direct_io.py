"""Reads a checkpoint's files, with O_DIRECT if the file system allows it, and detects changes to them."""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from bough.errors import CheckpointError, StreamError
from bough.runtime.exit_status import exit_soon
from target_worker.link.layer_extents import ALIGNMENT, Extent, LayerExtents

logger = logging.getLogger(__name__)

PIECE_BYTES = 8 * 1024 * 1024  # bytes of one read; smaller reads take more CPU time, which sweeps need as well

Allocate = Callable[[int], memoryview]  # takes a number of bytes, returns page-aligned memory


class FileState(NamedTuple):
    """Identity and version of a file's contents: changes whenever it is written to or replaced."""

    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, file: Path | int) -> FileState:
        """State of a path or an open descriptor. Raises OSError."""
        status = os.stat(file)
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)


class OpenFile(NamedTuple):
    """A file that is open for reading."""

    descriptor: int
    is_direct: bool


def open_file(file: Path) -> OpenFile:
    """Open with O_DIRECT if a probing read succeeds, else without. Raises CheckpointError."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
        try:
            with mmap.mmap(-1, ALIGNMENT) as probe:
                os.preadv(descriptor, [probe], 0)
            return OpenFile(descriptor, True)
        except OSError:
            os.close(descriptor)
    except OSError:
        pass
    logger.warning("%s: the file system refuses O_DIRECT; reading through the page cache", file)
    try:
        return OpenFile(os.open(file, os.O_RDONLY), False)
    except OSError as exc:
        raise CheckpointError(f"{file}: cannot be opened: {exc}") from exc


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

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = {file: open_file(file) for file in set(files)}
        self._states = {path: FileState.of(file.descriptor) for path, file in self._files.items()}

    @property
    def is_direct(self) -> bool:
        """Whether all reads bypass the page cache."""
        return all(file.is_direct for file in self._files.values())

    def close(self) -> None:
        for file in self._files.values():
            os.close(file.descriptor)

    def require_unchanged(self) -> None:
        """Check after reads, before their data is used, that no file was written to in place. Raises StreamError.

        On a change, reads may have mixed two checkpoints, and this process ends: its supervisor starts another with the
        new files.
        """
        for path, file in self._files.items():
            if FileState.of(file.descriptor) != self._states[path]:
                changed = StreamError(
                    f"{path}: was written to while the model is served; this worker ends, and can be restarted"
                )
                exit_soon(changed)
                raise changed

    def read(self, layer: LayerExtents, piece: ReadRange, slab: Slab) -> None:
        """Read one range of a layer into a slab. Raises StreamError naming the file, the layer and the tensor."""
        extent, file = piece.extent, self._files[piece.extent.file]
        needed, offset = min(piece.num_bytes, extent.needed_bytes - piece.begin), extent.offset + piece.begin
        begin, done = extent.slab_offset + piece.begin, 0
        target = slab.view[begin : begin + piece.num_bytes]
        try:
            while done < needed:
                count = _read_twice(file.descriptor, target[done:], offset + done)
                if count == 0:
                    raise OSError("the file ends here")
                done += count
        except OSError as exc:
            tensor = layer.tensor_at(extent.file, offset + done)
            raise StreamError(f"{extent.file}: {layer.name}, tensor {tensor}, byte {offset + done}: {exc}") from exc

    def load(self, layers: Sequence[LayerExtents], slabs: Sequence[Slab], num_threads: int) -> None:
        """Read whole layers, with several reads in flight. Raises StreamError as `read`."""
        jobs = [(layer, p, slab) for layer, slab in zip(layers, slabs, strict=True) for p in cut(layer.extents)]
        with ThreadPoolExecutor(num_threads, thread_name_prefix="load") as threads:
            for _ in threads.map(lambda job: self.read(*job), jobs):
                pass


def _read_twice(descriptor: int, target: memoryview, offset: int) -> int:
    """Bytes read. A failed read is repeated once, as a transient error would cost a sweep of seconds."""
    try:
        return os.preadv(descriptor, [target], offset)
    except OSError as exc:
        logger.warning("a read failed and is tried again: %s", exc)
    return os.preadv(descriptor, [target], offset)


def cut(extents: Sequence[Extent]) -> list[ReadRange]:
    """Split extents into ranges of one read each."""
    return [
        ReadRange(extent, begin, min(PIECE_BYTES, extent.num_bytes - begin))
        for extent in extents
        for begin in range(0, extent.num_bytes, PIECE_BYTES)
    ]
