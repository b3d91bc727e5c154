"""Whether accesses to the device's memory are ordered in every order of work that the marks allow.

Vector clocks: every lane, and every thread of the host, knows how much of each lane is surely over when its own next
piece begins. Two accesses to the same bytes from different lanes, one of them a write, of which neither surely comes
first, are a race on a real GPU, whichever came first here.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

Clock = dict[str, int]  # by lane: so many of its pieces are over


def compute_lane(index: int) -> str:
    """That a device computes in."""
    return f"compute {index}"


class Access(NamedTuple):
    """Of a lane to some bytes."""

    lane: str
    time: int
    begin: int
    end: int
    is_write: bool


def _join(clock: Clock, other: Clock) -> None:
    for lane, time in other.items():
        clock[lane] = max(clock.get(lane, 0), time)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses that a tensor's elements lie between."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


@dataclass
class Order:
    """Of all lanes of a device. `watched` memory is what more than one lane touches."""

    races: list[str] = field(default_factory=list)
    _lanes: dict[str, Clock] = field(default_factory=lambda: defaultdict(dict))
    _host: dict[int, Clock] = field(default_factory=lambda: defaultdict(dict))
    _watched: list[tuple[int, int]] = field(default_factory=list)
    _accesses: dict[int, list[Access]] = field(default_factory=lambda: defaultdict(list))
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def watch(self, memory: torch.Tensor) -> None:
        """Notes accesses to it from now on."""
        with self._lock:
            self._watched.append(_span(memory))

    def computes(self, read: list[torch.Tensor], written: list[torch.Tensor], index: int) -> None:
        """A piece of a device's computing lane."""
        self.works(compute_lane(index), read, written)

    def crosses(self, read: list[torch.Tensor], written: list[torch.Tensor], begin: int, end: int) -> None:
        """A copy from a device to another: in the first one's lane, and each waits for the other."""
        self.waits(compute_lane(begin), self.mark(compute_lane(end)))
        self.computes(read, written, begin)
        self.waits(compute_lane(end), self.mark(compute_lane(begin)))

    def works(self, lane: str, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        """A piece of a lane, queued by the calling thread."""
        with self._lock:
            clock = self._lanes[lane]
            _join(clock, self._host[threading.get_ident()])
            clock[lane] = clock.get(lane, 0) + 1
            for tensors, is_write in ((read, False), (written, True)):
                for tensor in tensors:
                    self._access(lane, clock, *_span(tensor), is_write)

    def mark(self, lane: str) -> Clock:
        """What is over when a lane has come so far."""
        with self._lock:
            return dict(self._lanes[lane])

    def waits(self, lane: str, mark: Clock) -> None:
        """A lane goes on when a mark is reached."""
        with self._lock:
            _join(self._lanes[lane], mark)

    def host_waits(self, mark: Clock) -> None:
        """The calling thread goes on when a mark is reached."""
        with self._lock:
            _join(self._host[threading.get_ident()], mark)

    def _access(self, lane: str, clock: Clock, begin: int, end: int, is_write: bool) -> None:
        for first, last in self._watched:
            if begin < last and first < end:
                self._compare(self._accesses[first], Access(lane, clock[lane], begin, end, is_write), clock)

    def _compare(self, accesses: list[Access], new: Access, clock: Clock) -> None:
        kept = []
        for old in accesses:
            meet, is_over = old.begin < new.end and new.begin < old.end, clock.get(old.lane, 0) >= old.time
            if meet and not is_over and old.lane != new.lane and (old.is_write or new.is_write):
                self.races.append(f"{new} beside {old}")
            is_hidden = is_over and new.is_write and new.begin <= old.begin and old.end <= new.end
            is_same = old._replace(time=new.time) == new
            if not (is_hidden or is_same):
                kept.append(old)
        accesses[:] = [*kept, new]
