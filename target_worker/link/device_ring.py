"""Copies layers from host memory to a device ahead of the sweep.

A thread queues copies of the layers cyclically, as the disk ring reads them; events in the device's streams order
copies and computation. So a sweep is queued without stops: its thread waits only until a copy is *queued*, and in a
mixture of experts for each layer's router.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from target_worker.link.copy_stats import CopyStats
from target_worker.link.disk_ring import LinkFigures
from target_worker.link.host_layers import HostLayers
from target_worker.link.streams import Copy, DeviceEvent, DeviceStreams


class DeviceRing:
    """Delivers layers in order, cyclically. One thread copies; one consumer takes layers with `layer()`.

    Sequence number s is layer `indices[s % len(indices)]`, in slab s % num_slabs.
    """

    def __init__(
        self,
        indices: Sequence[int],
        sizes: Sequence[int],
        source: HostLayers,
        streams: DeviceStreams,
        num_slabs: int,
        traffic: CopyStats | None = None,
        shifts: Sequence[int] = (),
    ) -> None:
        """`sizes` are the bytes of the layers `indices`; `traffic` may be shared by copies in the same stream.

        `shifts` are the byte offsets at which layers begin in their slabs, by default 0.
        """
        self._indices = tuple(indices)
        self._sizes = tuple(sizes)
        self._source = source
        self._streams = streams
        self._shifts = tuple(shifts) or (0,) * len(self._sizes)
        self._slabs = [streams.device_memory(max(sizes) + max(self._shifts)) for _ in range(num_slabs)]
        self._state = threading.Condition()
        self._is_closed = self._is_restarting = self._is_copying = False
        self._traffic = traffic or CopyStats()
        self._reset(streams.compute_event())  # memory comes again from whoever had it, and may still compute with it
        self._thread = threading.Thread(target=self._run, name="copies", daemon=True)

    def __enter__(self) -> DeviceRing:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._state:
            self._is_closed = True
            self._state.notify_all()
        self._thread.join()

    def _reset(self, computed: DeviceEvent) -> None:
        """Forget all copies. Nothing reads the slabs after `computed`."""
        self._issued = self._consumed = 0  # sequence numbers: next to copy, next for the sweep
        self._free_after = [computed] * len(self._slabs)
        self._copied: dict[int, DeviceEvent] = {}  # by sequence number: ends of queued copies
        self._error: Exception | None = None

    @contextmanager
    def layer(self, index: int) -> Iterator[torch.Tensor]:
        """Yield the next layer's slab (uint8, on the device) for computation queued within the block.

        `index` must be the next layer.

        Raises:
            StreamError: the layer could not be read; call `restart` before the next sweep.
        """
        sequence = self._consumed
        assert self._indices[sequence % len(self._indices)] == index, "layers are taken in order"
        with self._state:
            self._state.wait_for(lambda: self._error is not None or sequence in self._copied)
            if self._error is not None:
                raise self._error
            copied = self._copied.pop(sequence)
        ready = self._streams.compute_event()
        self._streams.compute_after(copied)
        self._traffic.waited(ready, self._streams.compute_event())
        yield self._slabs[sequence % len(self._slabs)][self._shifts[sequence % len(self._shifts)] :]
        computed = self._streams.compute_event()
        with self._state:
            self._free_after[sequence % len(self._slabs)] = computed
            self._consumed += 1
            self._state.notify_all()

    def restart(self) -> None:
        """Start again with the first layer, after an error or an aborted sweep."""
        with self._state:
            self._is_restarting = True
            self._state.wait_for(lambda: not self._is_copying)
        self._source.restart()
        computed = self._streams.compute_event()
        with self._state:
            self._reset(computed)
            self._is_restarting = False
            self._state.notify_all()

    def figures(self) -> LinkFigures:
        """Counters since the start; queued copies count when they end."""
        return self._traffic.figures()

    def _run(self) -> None:
        while (sequence := self._begin()) is not None:
            error: Exception | None = None
            try:
                self._copy(sequence)
            except Exception as exc:  # raised in the sweep that wants the layer
                error = exc
            with self._state:
                self._is_copying = False
                self._error = self._error or error
                self._state.notify_all()

    def _begin(self) -> int | None:
        """The next layer to copy, once the last use of its slab is queued; None when the ring is closed."""
        with self._state:
            self._state.wait_for(self._may_copy)
            if self._is_closed:
                return None
            self._is_copying = True
            self._issued += 1
            return self._issued - 1

    def _may_copy(self) -> bool:
        has_room = self._issued < self._consumed + len(self._slabs)
        return self._is_closed or (self._error is None and not self._is_restarting and has_room)

    def _copy(self, sequence: int) -> None:
        number, slab = sequence % len(self._indices), sequence % len(self._slabs)
        index, size = self._indices[number], self._sizes[number]
        with self._source.layer(index) as data:
            target = self._slabs[slab][self._shifts[number] :][:size]
            copy: Copy = self._streams.copy(data[:size], target, self._free_after[slab])
            self._traffic.copied(copy, size)
            with self._state:
                self._copied[sequence] = copy.done
                self._state.notify_all()
            if not self._source.stays(index):
                copy.done.synchronize()  # the next layer read from disk may reuse this memory
