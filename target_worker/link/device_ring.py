"""Copies layers from host memory to a device ahead of the sweep.

A thread queues copies of the layers cyclically, as the disk ring reads them; events in the device's streams order
copies and computation. So a sweep is queued without stops: its thread waits only until a copy is *queued*, and in a
mixture of experts for each layer's router.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch

from bough.errors import StreamError
from bough.protocol.messages import Timings
from target_worker.link.host_layers import HostLayers
from target_worker.link.link_stats import CopyStats
from target_worker.link.streams import DeviceEvent, DeviceStreams


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
        self._traffic = traffic or CopyStats()
        # For the next layer to take in each slab: the end of the copy, once it is queued; and the thread's work.
        self._copies: deque[tuple[Future[DeviceEvent], Future[None]]] = deque()
        self._reset(streams.compute_event())  # recycled memory may still be in use by queued computation
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="copies")

    def __enter__(self) -> DeviceRing:
        self._issue_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _reset(self, computed: DeviceEvent) -> None:
        """Begin with the first layer. Nothing reads the slabs after `computed`."""
        self._consumed = 0  # sequence number of the next layer to take
        self._free_after = [computed] * len(self._slabs)
        self._error: Exception | None = None  # a copy's error: no copy is queued after it

    @contextmanager
    def layer(self, index: int) -> Iterator[torch.Tensor]:
        """Yield the slab of the next layer, `index`, (uint8, on the device) for computation queued within the block.

        Raises StreamError if it could not be read, or the last `restart` failed; call it before the next sweep.
        """
        sequence = self._consumed
        if not self._copies:
            raise StreamError("no layer is being copied: the link could not be restarted after an error")
        assert self._indices[sequence % len(self._indices)] == index, "layers are taken in order"
        copied = self._copies[0][0].result()
        ready = self._streams.compute_event()
        self._streams.compute_after(copied)
        self._traffic.waited(ready, self._streams.compute_event())
        yield self._slabs[sequence % len(self._slabs)][self._shifts[sequence % len(self._shifts)] :]
        self._free_after[sequence % len(self._slabs)] = self._streams.compute_event()
        self._copies.popleft()
        self._consumed += 1
        self._issue(sequence + len(self._slabs))

    def restart(self) -> None:
        for _, work in self._copies:
            work.cancel()
        self._thread.submit(lambda: None).result()  # the copy under way may be of a layer that was taken already
        self._copies.clear()  # cancelled copies never end, and the next call may fail
        self._source.restart()
        self._reset(self._streams.compute_event())
        self._issue_all()

    def figures(self) -> Timings:
        """Counters since the start; queued copies count when they end."""
        return self._traffic.figures()

    def _issue_all(self) -> None:
        for sequence in range(len(self._slabs)):
            self._issue(sequence)

    def _issue(self, sequence: int) -> None:
        """Let the thread copy a layer; the last use of its slab is queued."""
        queued: Future[DeviceEvent] = Future()
        self._copies.append((queued, self._thread.submit(self._copy, sequence, queued)))

    def _copy(self, sequence: int, queued: Future[DeviceEvent]) -> None:
        number, slab = sequence % len(self._indices), sequence % len(self._slabs)
        index, size = self._indices[number], self._sizes[number]
        try:
            if self._error is not None:
                raise self._error
            with self._source.layer(index) as data:
                target = self._slabs[slab][self._shifts[number] :][:size]
                copy = self._streams.copy(data[:size], target, self._free_after[slab])
                self._traffic.copied(copy, size)
                queued.set_result(copy.done)
                if not self._source.stays(index):
                    copy.done.synchronize()  # the next layer read from disk may reuse this memory
        except Exception as exc:  # raised in the sweep that wants the layer, or the next one if this copy was queued
            self._error = exc
            if not queued.done():
                queued.set_exception(exc)
