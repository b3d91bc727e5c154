"""Experts in memory, as many as there is room for, and those read from disk that a layer's rows have chosen.

Which experts a layer wants is known only when its router has run. So each layer says what it wants (`expect`), and what
is not there is read while the first of them are computed. While the layer computes, there also comes what the layers
after it will probably want: experts that most of the last sweeps have wanted. So large trees, which want nearly all
experts, find them read ahead, as layers are by the ring; single tokens read what they choose, and little else.

What few sweeps want leaves first; of experts wanted alike, the one used last. Layers go round and round: its turn is
the farthest away, and those that stay are then the same in every round.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import Lock
from types import TracebackType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bough.errors import StreamError
from bough.model.experts import Experts, ExpertTable
from bough.model.pages import large_pages
from bough.model.source import ReusedMemory
from bough.placement import ExpertSizes
from target_worker.disk import Allocate, Disk, Piece, ReadError, Slab, cut, stream_error
from target_worker.stream import LinkFigures
from target_worker.weights import LayerExperts, LayerWeights

RATE = 0.25  # by which a sweep's choice changes how often an expert is said to be wanted
LIKELY = 0.5  # wanted in so many sweeps, an expert is read ahead
AHEAD_SHARE = 0.25  # of the room that may be taken by what was read ahead and not yet wanted
GRAINS = 8  # of how often an expert is wanted: finer differences are chance
NOBODY = -1


def sizes_of(layers: Collection[LayerExperts]) -> ExpertSizes:
    """Of some layers' experts."""
    sizes = [expert.num_bytes for layer in layers for expert in layer.each]
    return ExpertSizes(max(sizes), max(len(layer.each) for layer in layers), len(sizes), sum(sizes))


class _Asked(NamedTuple):
    """A parameter's `bough.model.experts.ExpertBytes`."""

    store: ExpertStore
    layer: int
    slot: int  # of its parameter among those of the layer's experts

    def expect(self, experts: Sequence[int]) -> None:
        self.store.expect(self.layer, experts)

    def of(self, expert: int) -> Sequence[torch.Tensor]:
        return self.store.bytes_of(self.layer, expert, self.slot)


class ExpertStore:
    """The experts of a model whose layers are computed in order, round and round, by one thread, which calls this."""

    def __init__(
        self,
        layers: Mapping[int, LayerExperts],
        num_bytes: int,
        num_threads: int,
        checksums: Mapping[str, int],
        allocate: Allocate = large_pages,
    ) -> None:
        """Takes so much memory, at least enough for a layer's experts; `checksums` (crc32 by tensor name) are compared
        when an expert is wanted for the first time.
        """
        self._layers = dict(layers)
        self._order = sorted(layers)
        self._num_threads = num_threads
        sizes = sizes_of(layers.values())
        slab_bytes, most, num_slabs = sizes.slab_bytes, sizes.most, num_bytes // sizes.slab_bytes
        assert num_slabs >= most, "a layer's rows may choose all its experts"
        memory = allocate(num_slabs * slab_bytes)
        self._slabs = [Slab.over(memory[i * slab_bytes : (i + 1) * slab_bytes]) for i in range(num_slabs)]
        num_layers = self._order[-1] + 1
        # By layer and expert: its slab, how often it is wanted (0 to 1), and whether this round's rows have wanted it.
        self._slab_of = np.full((num_layers, most), NOBODY, np.int64)
        self._usage = np.zeros((num_layers, most), np.float64)
        self._wanted = np.zeros(most, bool)
        # By slab: whose it is, when it was last taken or wanted, and whether it was read ahead of being wanted.
        self._layer_at = np.full(num_slabs, NOBODY, np.int64)
        self._expert_at = np.zeros(num_slabs, np.int64)
        self._used_at = np.zeros(num_slabs, np.int64)
        self._is_ahead = np.zeros(num_slabs, bool)
        self._reads: dict[int, list[Future[None]]] = {}  # under way, or not looked at since, by slab
        self._clock = 0
        self._layer = NOBODY  # that is computed
        self._checksums = checksums
        self._unseen = {(i, e) for i, layer in layers.items() for e in range(len(layer.each))} if checksums else set()
        self._lock, self._in_flight, self._busy_since_ns = Lock(), 0, 0
        self._num_bytes = self._busy_ns = self._wait_ns = 0

    def __enter__(self) -> ExpertStore:
        files = (extent.file for layer in self._layers.values() for expert in layer.each for extent in expert.extents)
        self._disk = Disk(files)
        self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="experts")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._disk.close()

    @property
    def is_direct(self) -> bool:
        """Whether all reads go past the page cache."""
        return self._disk.is_direct

    def bind(self, dtype: torch.dtype) -> None:
        """Puts tables that ask this one in the parameters' places; values that are no views share one memory."""
        scratch = torch.empty(max(layer.scratch_bytes(dtype) for layer in self._layers.values()), dtype=torch.uint8)
        for index, layer in self._layers.items():
            for number, slot in enumerate(layer.slots):
                assert isinstance(slot.source, Experts)
                slot.put(ExpertTable(slot.source, _Asked(self, index, number), dtype, ReusedMemory(scratch)))

    def begin(self, layer: int) -> None:
        """A layer's turn has come; one without experts is none of this one's business."""
        if layer not in self._layers:
            return
        if self._layer != NOBODY:
            self._usage[self._layer] += RATE * (self._wanted - self._usage[self._layer])
        self._layer = layer
        self._wanted[:] = False
        self._is_ahead[self._layer_at == layer] = False
        self._read_ahead(layer)

    def expect(self, layer: int, experts: Sequence[int]) -> None:
        """Rows of the layer whose turn it is have chosen these: what is missing of them is read from now on."""
        assert layer == self._layer, "experts are wanted in their layer's turn"
        self._wanted[list(experts)] = True
        self._clock += 1
        for expert in experts:
            slab = int(self._slab_of[layer, expert])
            if slab != NOBODY and any(read.done() and read.exception() for read in self._reads.get(slab, ())):
                self._forget(slab)  # it was read ahead, in vain; the cause may be gone
                slab = NOBODY
            if slab == NOBODY:
                slab = self._room_for_wanted()
                self._read(layer, expert, slab)
            self._used_at[slab] = self._clock
        self._look_ahead()

    def bytes_of(self, layer: int, expert: int, slot: int) -> tuple[torch.Tensor, ...]:
        """A parameter's tensors, uint8, of an expert that `expect` has named; valid until its layer's turn is over.

        Raises:
            StreamError: it could not be read, or is not what was written; call `restart` before the next sweep.
        """
        slab, weights = int(self._slab_of[layer, expert]), self._layers[layer].each[expert]
        data = self._slabs[slab].bytes
        try:
            self._wait_for(slab)
            if (layer, expert) in self._unseen:
                weights.verify(data, self._checksums)
        except StreamError:
            self._forget(slab)
            raise
        self._unseen.discard((layer, expert))
        return tuple(weights.bytes_of(place, data) for place in weights.slots[slot].source.places)

    def restart(self) -> None:
        """After an error or a sweep that was given up: the next one begins with the first layer."""
        self._layer = NOBODY

    def figures(self) -> LinkFigures:
        """Counters since the start."""
        with self._lock:
            busy_ns = self._busy_ns + (time.perf_counter_ns() - self._busy_since_ns if self._in_flight else 0)
            return LinkFigures(self._num_bytes, busy_ns, self._wait_ns)

    def _look_ahead(self) -> None:
        """To the layers that come next, round the end of the sweep."""
        now = self._order.index(self._layer)
        for layer in (*self._order[now + 1 :], *self._order[:now]):
            if not self._read_ahead(layer):
                return

    def _read_ahead(self, layer: int) -> bool:
        """What a layer will probably want; whether there is room for more."""
        missing = np.flatnonzero((self._usage[layer] > LIKELY) & (self._slab_of[layer] == NOBODY))
        for expert in missing[np.argsort(-self._usage[layer, missing], kind="stable")].tolist():
            if self._is_ahead.sum() >= AHEAD_SHARE * len(self._slabs):
                return False
            slab = self._room_for_guess(layer)
            if slab is None:
                return False
            self._read(layer, expert, slab)
            self._is_ahead[slab] = layer != self._layer
        return True

    def _room_for_wanted(self) -> int:
        """A slab: what this layer has wanted stays."""
        is_free = ~((self._layer_at == self._layer) & self._wanted[self._expert_at])
        slab = self._least_wanted(is_free & ~self._is_ahead)
        if slab is None:
            slab = self._least_wanted(is_free)
        assert slab is not None, "there is room for a layer's experts"
        return slab

    def _room_for_guess(self, layer: int) -> int | None:
        """A slab that holds nothing for the layer that is computed, nor what was read ahead."""
        return self._least_wanted((self._layer_at != self._layer) & (self._layer_at != layer) & ~self._is_ahead)

    def _least_wanted(self, among: NDArray[np.bool_]) -> int | None:
        """An empty slab, or that of what the fewest sweeps want, and was used last."""
        places = np.flatnonzero(among)
        if not len(places):
            return None
        usage = np.round(GRAINS * self._usage[self._layer_at[places], self._expert_at[places]])
        usage[self._layer_at[places] == NOBODY] = -1
        worst = places[usage == usage.min()]
        return int(worst[self._used_at[worst].argmax()])

    def _read(self, layer: int, expert: int, slab: int) -> None:
        """Begins to read an expert into a slab, which whoever was there leaves."""
        self._forget(slab)
        weights = self._layers[layer].each[expert]
        self._slab_of[layer, expert] = slab
        self._layer_at[slab], self._expert_at[slab], self._used_at[slab] = layer, expert, self._clock
        pieces = cut(weights.extents)
        self._reads[slab] = [self._threads.submit(self._read_piece, weights, piece, slab) for piece in pieces]

    def _forget(self, slab: int) -> None:
        """Empties a slab; nobody may still write into it."""
        reads = self._reads.pop(slab, ())
        wait([read for read in reads if not read.cancel()])
        if self._layer_at[slab] != NOBODY:
            self._slab_of[self._layer_at[slab], self._expert_at[slab]] = NOBODY
        self._layer_at[slab], self._is_ahead[slab] = NOBODY, False

    def _wait_for(self, slab: int) -> None:
        if slab not in self._reads:
            return
        began = time.perf_counter_ns()
        done, _ = wait(self._reads[slab])
        self._wait_ns += time.perf_counter_ns() - began
        for read in done:
            read.result()
        del self._reads[slab]

    def _read_piece(self, weights: LayerWeights, piece: Piece, slab: int) -> None:
        with self._under_way(piece.num_bytes):
            try:
                self._disk.read(piece, self._slabs[slab])
            except ReadError as exc:
                raise stream_error(exc, weights, piece.extent) from exc

    @contextmanager
    def _under_way(self, num_bytes: int) -> Iterator[None]:
        """Counts a read."""
        with self._lock:
            self._in_flight += 1
            if self._in_flight == 1:
                self._busy_since_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            with self._lock:
                self._in_flight -= 1
                self._num_bytes += num_bytes
                if not self._in_flight:
                    self._busy_ns += time.perf_counter_ns() - self._busy_since_ns
