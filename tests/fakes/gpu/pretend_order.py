"""A race detector: are accesses to the device's memory ordered in every order of work that the events allow?

It uses vector clocks: for every stream and every host thread it tracks how much of each stream is certainly over when
the next piece of work begins. Two accesses to the same bytes from different streams, at least one of them a write,
neither of which certainly comes first, are a race on a real GPU, whatever their order was here.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

Clock = dict[str, int]  # number of pieces of work that are over, by stream


def compute_stream(index: int) -> str:
    """Name of the stream in which a device computes."""
    return f"compute {index}"


class Access(NamedTuple):
    """A read or write of the bytes from address `begin` to `end` by a stream."""

    stream: str
    time: int  # number of the piece of work in its stream
    begin: int
    end: int
    is_write: bool


def _join(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        clock[stream] = max(clock.get(stream, 0), time)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first byte of a tensor's elements and of the byte after the last."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


@dataclass
class Order:
    """Detects races between streams in watched memory, and collects them in `races`."""

    races: list[str] = field(default_factory=list)
    _streams: dict[str, Clock] = field(default_factory=lambda: defaultdict(dict))
    _host: dict[int, Clock] = field(default_factory=lambda: defaultdict(dict))
    _watched: list[tuple[int, int]] = field(default_factory=list)
    _accesses: dict[int, list[Access]] = field(default_factory=lambda: defaultdict(list))
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def watch(self, memory: torch.Tensor) -> None:
        """Track accesses to this memory from now on."""
        with self._lock:
            self._watched.append(_span(memory))

    def computes(self, read: list[torch.Tensor], written: list[torch.Tensor], index: int) -> None:
        """Record a piece of work in a device's compute stream."""
        self.works(compute_stream(index), read, written)

    def crosses(self, read: list[torch.Tensor], written: list[torch.Tensor], begin: int, end: int) -> None:
        """Record a copy between devices: it runs in the first one's compute stream, and each waits for the other."""
        self.waits(compute_stream(begin), self.progress_of(compute_stream(end)))
        self.computes(read, written, begin)
        self.waits(compute_stream(end), self.progress_of(compute_stream(begin)))

    def works(self, stream: str, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        """Record a piece of work in a stream, queued by the calling thread."""
        with self._lock:
            clock = self._streams[stream]
            _join(clock, self._host[threading.get_ident()])
            clock[stream] = clock.get(stream, 0) + 1
            for tensors, is_write in ((read, False), (written, True)):
                for tensor in tensors:
                    self._access(stream, clock, *_span(tensor), is_write)

    def progress_of(self, stream: str) -> Clock:
        """What is certainly over once a stream has done all work queued so far."""
        with self._lock:
            return dict(self._streams[stream])

    def waits(self, stream: str, progress: Clock) -> None:
        """Record that a stream waits for an event with this progress."""
        with self._lock:
            _join(self._streams[stream], progress)

    def host_waits(self, progress: Clock) -> None:
        """Record that the calling thread waits for an event with this progress."""
        with self._lock:
            _join(self._host[threading.get_ident()], progress)

    def _access(self, stream: str, clock: Clock, begin: int, end: int, is_write: bool) -> None:
        for first, last in self._watched:
            if begin < last and first < end:
                self._compare(self._accesses[first], Access(stream, clock[stream], begin, end, is_write), clock)

    def _compare(self, accesses: list[Access], new: Access, clock: Clock) -> None:
        kept, (stream, _, begin, end, is_write) = [], new
        for old in accesses:
            is_over, meet = clock.get(old.stream, 0) >= old.time, old.begin < end and begin < old.end
            if not is_over and meet and old.stream != stream and (old.is_write or is_write):
                self.races.append(f"{new} beside {old}")
            is_hidden = is_over and is_write and begin <= old.begin and old.end <= end
            is_same = (old.begin, old.end, old.stream, old.is_write) == (begin, end, stream, is_write)
            if not (is_hidden or is_same):
                kept.append(old)
        accesses[:] = [*kept, new]
