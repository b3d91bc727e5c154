"""One pass of packed trees through the streamed layers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bough.model.architecture.moe import with_rows
from bough.model.batch.batch import Batch, Chunk, Segment
from bough.model.checkpoint.tensor_source import ReusedMemory
from bough.model.gpu.faults import named_faults
from bough.model.kv.slot import Slot
from bough.model.llama.weights import is_lean
from bough.model.loading.loading import Skeleton, bind_resident, move_buffers
from bough.model.running.batch_invariance import describe, make_reproducible
from bough.model.running.device import await_all, working_on
from bough.model.running.host_embeddings import embeddings_for_host, looked_up, split_slots
from bough.model.sampling.sampler import require_numbers
from bough.model.sizes.model_sizes import chosen_share
from bough.protocol.cost_curve import CostCurve
from bough.sizing.sweep_times import SweepPrior, expert_volume
from bough.trees.tree import Tree
from target_worker.kv.kv_offload import KVHome, KVInPlace
from target_worker.link.disk_ring import BestSpeed
from target_worker.link.layer_extents import MadeLayer
from target_worker.scheduler.sweep_figures import SweepFigures
from target_worker.sweep.compiled_layers import CompiledLayers, LayerAt
from target_worker.sweep.tiers import Tiers
from target_worker.sweep.warm_up import PassSeconds, compute_curve
from target_worker.verification.logit_rows import best_tokens

CPU = torch.device("cpu")
NANO = 1e-9
MOST_ROWS = 4096  # up to which it is told how many experts rows choose
SPEED_BYTES = 1000**3  # over which the link's speed is taken
WARM_LAYERS = 2  # where those are not of all kinds, a first sweep compiles what is missing
MOST_MADE = 2048  # layers in slabs of which that is kept: up to 20 KB each, beside the memory that is budgeted


class StreamedModel:
    """A target whose decoder layers get their parameters from where they live, one layer after another.

    transformers' own forward runs; only what each layer's `forward` does is replaced: wait for the slab, bind the
    parameters, run the layer on one chunk of rows after another. What is particular to an architecture stays its own.
    Where `CompiledLayers` can, they run the layer instead.
    """

    def __init__(
        self, skeleton: Skeleton, tiers: Tiers, rows: int, device: torch.device, kv: KVHome | None = None
    ) -> None:
        """Keys and values are where `kv` says; in the slots by default."""
        self.skeleton = skeleton
        self._kv = kv or KVInPlace()
        self.tiers = tiers
        self.rows = make_reproducible(skeleton, rows, device)
        is_whole = self.rows.step < self.rows.most and is_lean(skeleton, device)
        self._compiled = CompiledLayers(skeleton) if is_whole else None
        self.device = device
        self._figures = tiers.figures()
        self._best_speed = BestSpeed(self._figures, SPEED_BYTES)
        self._by_matrix = device.type != "cpu"  # there memory is short, and time is not
        self._others = tuple(dict.fromkeys(tiers.elsewhere.values()))  # devices
        self._scratch = {where: self._scratch_on(where) for where in (device, *self._others)}
        self._moved: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}  # see `_on`
        self._made: dict[LayerAt, MadeLayer] = {}
        self._has_failed = False  # the last sweep
        self._held: torch.Tensor | None = None  # layer 0's slab, while that layer alone is computed again and again
        self._layer_seconds = 0.0  # that it took the last time
        self.num_layers_begun = 0  # since the start
        self.best: torch.Tensor | None = None  # `best_tokens` of the last sweep, where logits are not the host's
        self._num_computed = len(tiers.layers)  # layers of a sweep, from the first on; rows pass by the others
        self._host_embeddings = embeddings_for_host(skeleton.model, device.type)
        for slots, where in zip(split_slots(skeleton, self._host_embeddings), (device, CPU), strict=True):
            with working_on(where):
                bind_resident(skeleton, slots, where)
        move_buffers(skeleton.model, device)
        for index, where in tiers.elsewhere.items():
            move_buffers(skeleton.layers[index], where)
        if tiers.experts is not None:
            tiers.experts.bind(skeleton.dtype)
        for index, layer in enumerate(skeleton.layers):
            layer.forward = self._streamed(index, layer.forward)

    def _scratch_on(self, device: torch.device) -> ReusedMemory:
        """Room for what is written out of a layer, as the largest of those that are computed there wants it."""
        own = (layer for i, layer in enumerate(self.tiers.layers) if self.tiers.elsewhere.get(i, self.device) == device)
        most = max((layer.scratch_bytes(self.skeleton.dtype, self._by_matrix) for layer in own), default=0)
        return ReusedMemory(torch.empty(most, dtype=torch.uint8, device=device))

    @torch.inference_mode()
    def sweep(self, batch: Batch) -> tuple[torch.Tensor, SweepFigures]:
        """(num_logit_rows, vocab_size) logits of the rows that want them, and where the time went.

        They are on the device, valid until the next sweep; of each row's largest `best` knows.

        Raises:
            StreamError: a layer could not be read, or a file was overwritten meanwhile; the ring has begun again and
                the next sweep may succeed.
            AcceleratorFull: there was no memory for so many rows.
            AcceleratorLost: the process ends.
        """
        began, kv_bytes = time.perf_counter_ns(), self._kv.num_bytes
        with named_faults(self.device):
            try:
                if self._has_failed:
                    self.tiers.renew()
                logits = self._logits(batch)
                self.tiers.require_unchanged()
            except BaseException:
                self._has_failed = True
                self.tiers.restart()
                raise
        self._has_failed = False
        return logits, self._account(time.perf_counter_ns() - began, kv_bytes)

    @torch.inference_mode()
    def warm_up(self, slot: Slot) -> SweepPrior:
        """Passes a token through the first layers and the head, so that what is made at the first use is there.

        Then, but for mixtures of experts, the rows that a slot has room for through the first layer, which tells what
        sweeps can be expected to take. The link begins again with layer 0. Rows are written, and not committed.

        Raises:
            StreamError: one of these layers could not be read.
            Unavailable: what came of them is not numbers.
        """
        num_layers = len(self.tiers.layers)
        try:
            logits = self._first_layers(slot, 1, min(WARM_LAYERS, num_layers))
            require_numbers(logits[0].cpu().double().numpy(), 0)
            if self.tiers.experts is not None:  # which rows choose, not what pads them; and some take long to come
                return SweepPrior(step=1, volume=self._expert_volume())
            self.tiers.restart()
            with self.tiers.layer(0) as self._held:
                compute = compute_curve(self._passes(slot), self.rows, slot.num_rows, num_layers)
        finally:
            self._held = None
            self.tiers.restart()
            self._figures = self.tiers.figures()
        speed, num_bytes = self._best_speed.seen(self._figures), self.tiers.placement.link_bytes
        return SweepPrior(compute.step, compute, num_bytes, num_bytes / speed * NANO if speed else 0.0)

    def _expert_volume(self) -> CostCurve:
        """Bytes that sweeps take over the link, by rows, if these choose for themselves."""
        placement = self.tiers.placement
        expert_bytes = max(0, placement.expert_bytes - placement.fixed.experts)
        share = chosen_share(self.skeleton.config)
        return expert_volume(placement.link_bytes - expert_bytes, expert_bytes, share, MOST_ROWS)

    def _first_layers(self, slot: Slot, num_rows: int, num_layers: int) -> torch.Tensor:
        """Logits of a root and rows below it, of the first layers alone."""
        tree = Tree.of([0] * num_rows, [-1] + [0] * (num_rows - 1), [0.0] * num_rows)
        num_all, self._num_computed = self._num_computed, num_layers
        try:
            return self._logits(Batch([Segment.tree(slot, 0, tree)], self.rows, self.device))
        finally:
            self._num_computed = num_all

    def _passes(self, slot: Slot) -> Callable[[int], PassSeconds]:
        """Of tokens through the layer that is held."""

        def one_layer(num_tokens: int) -> PassSeconds:
            began = time.perf_counter()
            self._first_layers(slot, num_tokens, 1)
            return PassSeconds(self._layer_seconds, time.perf_counter() - began - self._layer_seconds)

        return one_layer

    def _logits(self, batch: Batch) -> torch.Tensor:
        with working_on(self.device), self._kv.sweep(batch) as batch:
            batch.send(self._others)
            self._moved.clear()
            output = self.skeleton.model(
                **self._inputs(batch),
                position_ids=batch.position_ids,
                use_cache=False,
                logits_to_keep=batch.logit_rows,
                batch=batch,
            )
            logits: torch.Tensor = output.logits[0]
            self.best = None if self.device.type == "cpu" else best_tokens(logits)
            return logits

    def _inputs(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Of transformers' forward: tokens, or what the host has looked up for them."""
        if self._host_embeddings is None:
            return {"input_ids": batch.input_ids}
        return {"inputs_embeds": looked_up(self._host_embeddings, batch, self.device)}

    def _account(self, total_ns: int, kv_bytes: int) -> SweepFigures:
        """What the link has done since the last sweep; `kv_bytes` were copied before this one."""
        before, self._figures = self._figures, self.tiers.figures()
        link_ns, link_bytes = self._figures.busy_ns - before.busy_ns, self._figures.num_bytes - before.num_bytes
        speed = self._best_speed.seen(self._figures)
        ideal_ns = round(link_bytes / speed) if speed else 0
        wait_ns = self._figures.wait_ns - before.wait_ns
        return SweepFigures(total_ns, wait_ns, link_ns, link_bytes, ideal_ns, self._kv.num_bytes - kv_bytes)

    def _streamed(self, index: int, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(hidden_states: torch.Tensor, batch: Batch, **kwargs: Any) -> torch.Tensor:
            if index >= self._num_computed:
                return hidden_states
            self.num_layers_begun += 1
            where = self.tiers.elsewhere.get(index, self.device)
            if self._others:
                hidden_states, kwargs = hidden_states.to(where, non_blocking=True), self._on(where, kwargs)
            arrival = self.tiers.layer(index) if self._held is None else self._timed(self._held)
            with arrival as slab, self._kv.layer(index), working_on(where):
                place = self._bind(index, slab)
                if self._compiled is not None:
                    is_last, rotary = index + 1 == self._num_computed, kwargs["position_embeddings"]
                    return self._compiled.run(index, place, hidden_states, batch, rotary, is_last)
                parts = []
                for chunk in batch.chunks:
                    with with_rows(chunk.num_tokens):
                        rows = hidden_states[:, chunk.begin : chunk.end]
                        parts.append(forward(rows, chunk=chunk, **_narrow(kwargs, chunk, batch)))
                out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
            return out.to(self.device, non_blocking=True) if index + 1 == self._num_computed else out

        return run

    def _on(self, device: torch.device, kwargs: dict[str, Any]) -> dict[str, Any]:
        """A layer's keyword arguments where it is computed. What is sent there is sent once in a sweep."""

        def send(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(send, value))
            if not isinstance(value, torch.Tensor) or value.device == device:
                return value
            kept = self._moved.get((id(value), device))  # which keeps the original: its id is nobody else's
            if kept is None:
                kept = self._moved[id(value), device] = (value, value.to(device, non_blocking=True))
            return kept[1]

        return {name: send(value) for name, value in kwargs.items()}

    @contextmanager
    def _timed(self, slab: torch.Tensor) -> Iterator[torch.Tensor]:
        """Instead of the arrival of a layer that is held: times what is done with it, where it is."""
        await_all(self.device)  # from which rows may have to cross
        await_all(slab.device)
        began = time.perf_counter()
        yield slab
        await_all(slab.device)
        self._layer_seconds = time.perf_counter() - began

    @property
    def arithmetic(self) -> str:
        """What two targets must have in common to give the same bits, beside device and library."""
        return f"{describe(self.rows)}{', layers compiled whole' if self._compiled is not None else ''}"

    def _bind(self, index: int, slab: torch.Tensor) -> LayerAt | None:
        """Values are in the same places whenever a layer comes to the same slab: they are made once, and those that
        are no views, in memory that layers share, are written again.

        Returns where they are, None where they are not kept.
        """
        layer, place = self.tiers.layers[index], (index, slab.data_ptr())
        made = self._made.get(place)
        if made is None:
            made = layer.made(slab, self.skeleton.dtype, self._scratch[slab.device], self._by_matrix)
            if len(self._made) < MOST_MADE:
                self._made[place] = made
        else:
            made.write()
        layer.put(made)
        return place if place in self._made else None


def _narrow(kwargs: dict[str, Any], chunk: Chunk, batch: Batch) -> dict[str, Any]:
    """A layer's keyword arguments for the rows of one chunk: whatever is shaped (1, num_rows, ...) is cut."""

    def cut(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(cut, value))
        if isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[1] == batch.num_rows:
            return value[:, chunk.begin : chunk.end]
        return value

    return {name: cut(value) for name, value in kwargs.items()}
