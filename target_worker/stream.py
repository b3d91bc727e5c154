"""The link: layers read from disk by threads into a ring of aligned slabs, ahead of the sweep and across its end.

The ring goes round the layers for ever: after the last comes the first again, so that the next sweep's first layers
arrive while trees are being grown. Knows nothing of models; a layer is a list of extents.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

import torch

from bough.errors import StreamError
from bough.model.pages import large_pages
from target_worker.disk import Allocate, Disk, Piece, ReadError, Slab, cut, stream_error
from target_worker.weights import LayerWeights


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """What the link has done since the start."""

    num_bytes: int  # read
    busy_ns: int  # with at least one read under way
    wait_ns: int  # sweeps waited for a layer


class Ring:
    """Delivers layers in order, round and round. Threads read; one consumer takes layers with `layer()`.

    Sequence number s stands for layer s % num_layers, in slab s % num_slabs.
    """

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        disk: Disk,
        num_slabs: int,
        num_threads: int,
        allocate: Allocate = large_pages,
    ) -> None:
        self.layers = tuple(layers)
        self.num_slabs = num_slabs
        self._disk = disk
        slab_bytes = max(layer.num_bytes for layer in layers)
        memory = allocate(slab_bytes * num_slabs)
        self._slabs = [Slab.over(memory[i * slab_bytes : (i + 1) * slab_bytes]) for i in range(num_slabs)]
        self._pieces = [cut(layer.extents) for layer in layers]
        self._state = threading.Lock()
        self._progress = threading.Condition(self._state)  # for the one who takes layers
        self._room = threading.Condition(self._state)  # for those who read; each that finds work wakes another
        self._closed = False
        self._reset()
        self._reads_in_flight = 0
        self._busy_since_ns = 0
        self._num_bytes = self._busy_ns = self._wait_ns = 0
        self._threads = [threading.Thread(target=self._read, name=f"link-{i}", daemon=True) for i in range(num_threads)]

    def __enter__(self) -> Ring:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._state:
            self._closed = True
            self._room.notify_all()
        for thread in self._threads:
            thread.join()

    def _reset(self) -> None:
        self._consumed = 0  # sequence number of the layer that the sweep wants next
        self._issued = (0, 0)  # sequence number and piece that are read next
        self._missing: dict[int, int] = {}  # pieces still to come, of the layers that are being read
        self._error: StreamError | None = None

    @contextmanager
    def layer(self, index: int) -> Iterator[torch.Tensor]:
        """The next layer's slab, (slab_bytes,) uint8, valid until the block ends.

        `index` must be the layer that is next.

        Raises:
            StreamError: where it could not be read; call `restart` before the next sweep.
        """
        sequence = self._consumed
        assert sequence % len(self.layers) == index, "layers are taken in order"
        began = time.perf_counter_ns()
        with self._state:
            self._progress.wait_for(lambda: self._error is not None or self._has_arrived(sequence))
            if self._error is not None:
                raise self._error
            self._wait_ns += time.perf_counter_ns() - began
        yield self._slabs[sequence % self.num_slabs].bytes
        with self._state:
            self._consumed += 1
            self._missing.pop(sequence, None)
            self._room.notify()

    def restart(self) -> None:
        """Begins again with layer 0, after an error or a sweep that was given up."""
        with self._state:
            self._progress.wait_for(lambda: self._reads_in_flight == 0)  # nobody may still write into a slab
            self._reset()
            self._room.notify()

    def figures(self) -> LinkFigures:
        """Counters since the start."""
        with self._state:
            running = time.perf_counter_ns() - self._busy_since_ns if self._reads_in_flight else 0
            return LinkFigures(self._num_bytes, self._busy_ns + running, self._wait_ns)

    def _has_arrived(self, sequence: int) -> bool:
        return self._missing.get(sequence) == 0

    def _read(self) -> None:
        while (work := self._take()) is not None:
            sequence, piece = work
            self._finish(sequence, piece, self._fill(sequence, piece))

    def _take(self) -> tuple[int, Piece] | None:
        """The next piece to read, once its slab is free; None when the ring is closed."""
        with self._state:
            self._room.wait_for(self._may_read)
            if self._closed:
                return None
            sequence, number = self._issued
            pieces = self._pieces[sequence % len(self.layers)]
            if number == 0:
                self._missing[sequence] = len(pieces)
            self._issued = (sequence, number + 1) if number + 1 < len(pieces) else (sequence + 1, 0)
            if self._reads_in_flight == 0:
                self._busy_since_ns = time.perf_counter_ns()
            self._reads_in_flight += 1
            if self._may_read():
                self._room.notify()
            return sequence, pieces[number]

    def _may_read(self) -> bool:
        return self._closed or (self._error is None and self._issued[0] < self._consumed + self.num_slabs)

    def _finish(self, sequence: int, piece: Piece, error: StreamError | None) -> None:
        with self._state:
            self._reads_in_flight -= 1
            if self._reads_in_flight == 0:
                self._busy_ns += time.perf_counter_ns() - self._busy_since_ns
            self._num_bytes += piece.num_bytes
            self._missing[sequence] -= 1
            self._error = self._error or error
            if error is not None or self._reads_in_flight == 0 or self._has_arrived(sequence):
                self._progress.notify_all()

    def _fill(self, sequence: int, piece: Piece) -> StreamError | None:
        """Reads one piece; an error is returned, to be raised where the layer is wanted."""
        try:
            self._disk.read(piece, self._slabs[sequence % self.num_slabs])
        except ReadError as exc:
            return stream_error(exc, self.layers[sequence % len(self.layers)], piece.extent)
        return None
