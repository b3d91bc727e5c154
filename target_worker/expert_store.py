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
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bough.errors import StreamError
from bough.model.experts import Experts, ExpertTable
from bough.model.pages import large_pages
from bough.model.source import ReusedMemory
from target_worker.disk import Allocate, Disk, Piece, ReadError, Slab, cut, stream_error
from target_worker.stream import LinkFigures
from target_worker.traffic import Traffic, read_begins, read_ends
from target_worker.weights import LayerExperts, LayerWeights, sizes_of

RATE = 0.25  # by which a sweep's choice changes how often an expert is said to be wanted
LIKELY = 0.5  # wanted in so many sweeps, an expert is read ahead
AHEAD_SHARE = 0.25  # of the room that may be taken by what was read ahead and not yet wanted
GRAINS = 8  # of how often an expert is wanted: finer differences are chance
NOBODY = -1


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
        traffic: Traffic | None = None,
        allocate: Allocate = large_pages,
    ) -> None:
        """Takes so much memory, at least enough for a layer's experts; `checksums` (crc32 by tensor name) are compared
        when an expert is wanted for the first time; `traffic` counts what is read, with what others read.
        """
        self._layers = dict(layers)
        self._num_threads = num_threads
        sizes = sizes_of(layers.values())
        slab_bytes, most, num_slabs = sizes.slab_bytes, sizes.most, num_bytes // sizes.slab_bytes
        assert num_slabs >= most, "a layer's rows may choose all its experts"
        memory = allocate(num_slabs * slab_bytes)
        self._slabs = [Slab.over(memory[i * slab_bytes : (i + 1) * slab_bytes]) for i in range(num_slabs)]
        num_layers = max(layers) + 1
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
        self._traffic = traffic or Traffic.none_yet()
        self._wait_ns = 0  # since the start, for reads

    def __enter__(self) -> ExpertStore:
        files = (extent.file for layer in self._layers.values() for expert in layer.each for extent in expert.extents)
        self._disk = Disk(files)
        self._threads, self._ahead_threads = (
            ThreadPoolExecutor(self._num_threads, thread_name_prefix=name) for name in ("experts", "experts-ahead")
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._ahead_threads.shutdown(cancel_futures=True)
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
        self._look_ahead()

    def expect(self, layer: int, experts: Sequence[int]) -> None:
        """Rows of the layer whose turn it is have chosen these: what is missing of them is read from now on."""
        assert layer == self._layer, "experts are wanted in their layer's turn"
        missing = [expert for expert in experts if not self._is_coming(layer, expert)]
        self._wanted[list(experts)] = True
        self._clock += 1
        for expert, slab in zip(missing, self._room_for_wanted(len(missing)).tolist(), strict=True):
            self._read(layer, expert, slab, self._threads)
        self._used_at[self._slab_of[layer, list(experts)]] = self._clock
        self._look_ahead()

    def bytes_of(self, layer: int, expert: int, slot: int) -> tuple[torch.Tensor, ...]:
        """A parameter's tensors, uint8, of an expert that `expect` has named; valid until its layer's turn is over.

        Raises:
            StreamError: it could not be read, or is not what was written; call `restart` before the next sweep.
        """
        slab, weights = int(self._slab_of[layer, expert]), self._layers[layer].each[expert]
        assert slab != NOBODY, "who asks for an expert has said so"
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
        """After an error or a sweep that was given up: what its last layer wanted is no sign of what others will."""
        self._layer = NOBODY

    def figures(self) -> LinkFigures:
        """Counters since the start, of all who count with the same `traffic`; waits are for experts."""
        return LinkFigures.of(self._traffic, self._wait_ns)

    def _is_coming(self, layer: int, expert: int) -> bool:
        """Whether an expert is there or under way, and then before what is read ahead."""
        slab = int(self._slab_of[layer, expert])
        if slab == NOBODY:
            return False
        reads = self._reads.get(slab, [])
        if any(read.done() and read.exception() for read in reads):
            self._forget(slab)  # it was read ahead, in vain; the cause may be gone
            return False
        weights = self._layers[layer].each[expert]
        for number, piece in enumerate(cut(weights.extents) if reads and not self._wanted[expert] else ()):
            if reads[number].cancel():
                reads[number] = self._threads.submit(self._read_piece, weights, piece, slab)
        return True

    def _look_ahead(self) -> None:
        """Reads what the layers that come next, round the end of the sweep, will probably want.

        What is there and as likely to be wanted stays, unless it is another layer's: that one's turn has just been.
        """
        room = int(AHEAD_SHARE * len(self._slabs)) - int(self._is_ahead.sum())
        layers, experts = np.nonzero((self._usage > LIKELY) & (self._slab_of == NOBODY))
        if room <= 0 or not len(layers):
            return
        leaving = self._leaving((self._layer_at != self._layer) & ~self._is_ahead)
        turns, grains, others = (layers - self._layer) % len(self._usage), self._grains(layers, experts), iter(leaving)
        slab = next(others, None)
        for guess in np.lexsort((-self._usage[layers, experts], turns))[: 2 * room]:
            if room <= 0 or slab is None:
                return
            in_slab = self._grains_at(slab)
            if in_slab < grains[guess] or (in_slab == grains[guess] and self._layer_at[slab] != layers[guess]):
                layer = int(layers[guess])
                self._read(layer, int(experts[guess]), int(slab), self._ahead_threads)
                self._is_ahead[slab] = layer != self._layer
                room, slab = room - 1, next(others, None)

    def _room_for_wanted(self, count: int) -> NDArray[np.int64]:
        """Slabs: what this layer has wanted stays, and what was read ahead as far as that goes."""
        if not count:
            return np.empty(0, np.int64)
        leaving = self._leaving(~((self._layer_at == self._layer) & self._wanted[self._expert_at]))
        return leaving[np.argsort(self._is_ahead[leaving], kind="stable")][:count]

    def _leaving(self, among: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Slabs in the order in which they are given up: empty ones, then by `GRAINS`, then the one used last."""
        slabs = np.flatnonzero(among)
        return slabs[np.lexsort((-self._used_at[slabs], self._grains_at(slabs)))]

    def _grains_at(self, slabs: NDArray[np.int64]) -> NDArray[np.float64]:
        """How often what is in them is wanted, -1 where nothing is."""
        layers = self._layer_at[slabs]
        return np.where(layers == NOBODY, -1.0, self._grains(layers, self._expert_at[slabs]))

    def _grains(self, layers: NDArray[np.int64], experts: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.round(GRAINS * self._usage[layers, experts])

    def _read(self, layer: int, expert: int, slab: int, threads: ThreadPoolExecutor) -> None:
        """Begins to read an expert into a slab, which whoever was there leaves."""
        self._forget(slab)
        weights = self._layers[layer].each[expert]
        pieces = cut(weights.extents)
        self._reads[slab] = [threads.submit(self._read_piece, weights, piece, slab) for piece in pieces]
        self._slab_of[layer, expert] = slab
        self._layer_at[slab], self._expert_at[slab], self._used_at[slab] = layer, expert, self._clock

    def _forget(self, slab: int) -> None:
        """Empties a slab; nobody may still write into it."""
        self._wait([read for read in self._reads.pop(slab, ()) if not read.cancel()])
        if self._layer_at[slab] != NOBODY:
            self._slab_of[self._layer_at[slab], self._expert_at[slab]] = NOBODY
        self._layer_at[slab], self._is_ahead[slab] = NOBODY, False

    def _wait_for(self, slab: int) -> None:
        if slab in self._reads:
            self._wait(self._reads[slab])
            for read in self._reads[slab]:
                read.result()
            del self._reads[slab]

    def _wait(self, reads: Sequence[Future[None]]) -> None:
        began = time.perf_counter_ns()
        wait(reads)
        self._wait_ns += time.perf_counter_ns() - began

    def _read_piece(self, weights: LayerWeights, piece: Piece, slab: int) -> None:
        read_begins(self._traffic)
        try:
            self._disk.read(piece, self._slabs[slab])
        except ReadError as exc:
            raise stream_error(exc, weights, piece.extent) from exc
        finally:
            read_ends(self._traffic, piece.num_bytes)
