"""One pass of packed trees through the streamed layers; the engine's Sweeper, whose parts become one batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch

from bough.errors import StreamError
from bough.grammar.allowed_tokens import Grammars
from bough.model.architecture.moe import Choices, counted_experts, has_own_products, routed_together, with_rows
from bough.model.backend import backend_of
from bough.model.batch.batch import Batch, Chunk, Segment
from bough.model.checkpoint.tensor_source import ReusedMemory
from bough.model.faults import named_faults
from bough.model.kv.slot import Slot
from bough.model.kv.states import kv_places
from bough.model.loading.loading import Skeleton, bind_resident, move_buffers
from bough.model.packed import num_experts_of
from bough.model.running.batch_invariance import describe, make_reproducible
from bough.model.running.device import await_all, on_host_together, working_on
from bough.model.running.host_embeddings import between_layers, embeddings_for_host, looked_up, split_slots
from bough.model.sampling.sampler import require_numbers
from bough.model.sizes.model_sizes import expert_counts
from bough.protocol.cost_curve import CostCurve
from bough.protocol.messages import Timings, Verdict
from bough.sizing.distinct_experts import Mixture
from bough.sizing.row_counts import RowCounts
from bough.sizing.sweep_times import SweepTimes
from bough.trees.tree import Tree
from target_worker.kv.kv_offload import KVHome
from target_worker.link.layer_extents import MaterializedLayer
from target_worker.link.link_stats import BestSpeed
from target_worker.scheduler.batching import Part
from target_worker.scheduler.job import SweepInFlight, Swept, VerifyJob
from target_worker.sweep.tiers import Tiers
from target_worker.verification.verdict import LogitRows, RowReader, best_tokens, compute_verdict

LayerAt = tuple[int, int]  # a layer's index, and the address of its slab
Result = TypeVar("Result")
CPU = torch.device("cpu")
NANO = 1e-9
SPEED_BYTES = 1000**3  # least bytes over which the link's speed is measured
WARM_LAYERS = 2  # layers of the first pass of warm-up; layers of other kinds are compiled in the first sweep
MOST_CACHED = 2048  # limit of cached layers' parameters: up to 20 KB each, outside the memory budget
# Tried besides the fewest and the most rows, while time is left: tiles of kernels end at powers of two.
TRIED_ROWS = (8, 64, 256, 16, 17, 32, 33, 128, 512)
ENOUGH_SECONDS = 0.5  # limit of measuring; the fewest and the most rows are always measured
TIMES = 3  # repetitions; the shortest counts, as other processes may be computing
LEAST_SECONDS = 1e-6


class StageLayers(NamedTuple):
    """The layers [first, end) of a model that a process holds, of `total`."""

    first: int
    end: int
    total: int

    @property
    def is_first(self) -> bool:
        return self.first == 0

    @property
    def is_last(self) -> bool:
        return self.end == self.total


class StreamedModel:
    """A target whose decoder layers load their parameters one after another.

    transformers' own forward runs; only each layer's `forward` is replaced: wait for the slab, bind the parameters, and
    run the layer in chunks of rows. So all code specific to an architecture is transformers'.
    `CompiledLayers` replaces the layer if it supports it.

    A model of several stages has some of its layers at this process. Head and stages compute theirs with `run_layers`,
    and `logits_of` is the head's end of a sweep; on one machine `sweep` does all.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        tiers: Tiers,
        rows: int,
        device: torch.device,
        kv: KVHome | None = None,
        stage: StageLayers | None = None,
    ) -> None:
        """`kv` says where sweeps find keys and values; by default in the slots.

        `skeleton` has the layers of `stage` only; by default these are all.
        """
        self.skeleton = skeleton
        self._stage = stage or StageLayers(0, len(skeleton.layers), len(skeleton.layers))
        self._received: torch.Tensor | None = None  # during a pass: the rows of other stages' layers
        self._kept: list[torch.Tensor] | None = None  # during a pass for the next stage: the last own layer's rows
        self._kv = kv or KVHome()
        self.tiers = tiers
        self.rows = make_reproducible(skeleton, rows, device)
        backend = backend_of(device)
        is_whole = self.rows.step < self.rows.most and backend.compiles(skeleton)
        self._compiled = backend.layers(skeleton) if is_whole else None
        self.device = device
        self._figures = tiers.figures()
        self._best_speed = BestSpeed(self._figures, SPEED_BYTES)
        self._by_matrix = device.type != "cpu"  # saves memory for some time, of which a GPU has enough
        self._others = tuple(dict.fromkeys(tiers.elsewhere.values()))  # devices
        self._scratch = {where: self._scratch_on(where) for where in (device, *self._others)}
        self._moved: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}  # see `_on`
        self._materialized: dict[LayerAt, MaterializedLayer] = {}
        self._held: torch.Tensor | None = None  # layer 0's slab, while warm-up measures that layer
        self._layer_seconds = 0.0  # of the last measured layer
        self.num_layers_begun = 0  # since the start
        self._chosen: Choices = []  # by layer, distinct experts of the last pass and those of one row
        self.kv_bytes = 0  # keys and values that the last sweep copied between host and device
        self.best: torch.Tensor | None = None  # `best_tokens` of the last sweep; None on a CPU
        self._num_computed = len(tiers.layers)  # layers that a pass runs, from the first on; others return their input
        self._host_embeddings = embeddings_for_host(skeleton.model, device.type) if self._stage.is_first else None
        is_first, host = self._stage.is_first, self._host_embeddings
        resident = split_slots(skeleton, host) if is_first else (between_layers(skeleton), [])
        for slots, where in zip(resident, (device, CPU), strict=True):
            with working_on(where):
                bind_resident(skeleton, slots, where)
        move_buffers(skeleton.model, device)
        if self._host_embeddings is not None:
            move_buffers(self._host_embeddings, CPU)  # such as the factor of Gemma's embeddings
        for index, where in tiers.elsewhere.items():
            move_buffers(skeleton.layers[index], where)
        if tiers.experts is not None:
            tiers.experts.bind(skeleton.dtype)
        for index, layer in enumerate(skeleton.layers):
            layer.forward = self._streamed(index, layer.forward)

    def _scratch_on(self, device: torch.device) -> ReusedMemory:
        """Scratch memory for the largest layer that is computed there."""
        own = (layer for i, layer in enumerate(self.tiers.layers) if self.tiers.elsewhere.get(i, self.device) == device)
        most = max((layer.scratch_bytes(self.skeleton.dtype, self._by_matrix) for layer in own), default=0)
        return ReusedMemory(torch.empty(most, dtype=torch.uint8, device=device))

    @torch.inference_mode()
    def sweep(self, batch: Batch) -> tuple[torch.Tensor, Timings]:
        """Logits (num_logit_rows, vocab_size) of the rows that want them, and where the time went.

        Logits are on the device, valid until the next sweep; `best` has each row's largest.

        Raises:
            StreamError: a layer could not be read; the link was restarted, and the next sweep may succeed. Or a file
                was overwritten; the process ends.
            AcceleratorFull: there was too little memory for so many rows.
            AcceleratorLost: the device has failed; the process ends.
        """
        return self._measured(lambda: self._logits(batch, self._inputs(batch)))

    @torch.inference_mode()
    def run_layers(self, batch: Batch, hidden: torch.Tensor | None = None) -> tuple[torch.Tensor, Timings]:
        """The rows (1, num_rows, hidden_size) after this process's layers, on the host, for the next stage.

        `hidden` are those of the stage before; the first begins with the batch's tokens. Raises what `sweep` does.
        """
        decoder, kept = self.skeleton.model.get_decoder(), list[torch.Tensor]()
        inputs = self._inputs if hidden is None else self._unused
        with self._passing(hidden, kept):
            _, timings = self._measured(lambda: self._pass(batch, decoder, inputs(batch)))
        return kept[0], timings

    @torch.inference_mode()
    def logits_of(self, batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        """The logits, as `sweep` returns them, of rows (1, num_rows, hidden_size) after the last stage's layers."""
        num_all, self._num_computed = self._num_computed, 0
        try:
            with named_faults(self.device, self._others), self._passing(hidden):
                return self._logits(batch, self._unused(batch))
        finally:
            self._num_computed = num_all

    @contextmanager
    def _passing(self, received: torch.Tensor | None, kept: list[torch.Tensor] | None = None) -> Iterator[None]:
        self._received, self._kept = None if received is None else received.to(self.device), kept
        try:
            yield
        finally:
            self._received = self._kept = None

    def _unused(self, batch: Batch) -> dict[str, Any]:
        """Inputs instead of which the first own layer reads the received rows."""
        size = (1, batch.num_rows, int(self.skeleton.config.hidden_size))
        return {"inputs_embeds": torch.zeros(size, dtype=self.skeleton.dtype, device=self.device)}

    def _measured(self, run: Callable[[], Result]) -> tuple[Result, Timings]:
        """Run a pass over the layers, and say where its time went."""
        began, before = time.perf_counter_ns(), self._kv.num_bytes
        with named_faults(self.device, self._others):
            try:
                result = run()
            except BaseException:
                self.tiers.restart()
                with suppress(StreamError):  # the first error is more informative, but the process ends in either case
                    self.tiers.require_unchanged()
                raise
            self.tiers.require_unchanged()
        self.kv_bytes = self._kv.num_bytes - before
        return result, self._account(time.perf_counter_ns() - began)

    @torch.inference_mode()
    def warm_up(self, slot: Slot, most_rows: int) -> SweepTimes:
        """Pass a token through the first layers and the head, which compiles and allocates.

        Except for mixtures of experts, layer 0 then runs on up to as many rows as the slot has, to predict the time of
        sweeps. The link restarts with layer 0. Rows are written to the slot but not committed. Raises what `sweep`
        does, and Unavailable if the logits are not finite.
        """
        with named_faults(self.device, self._others):
            return self._warmed_up(slot, most_rows)

    def _warmed_up(self, slot: Slot, most_rows: int) -> SweepTimes:
        num_layers = len(self.tiers.layers)
        try:
            logits = self._first_layers(slot, 1, min(WARM_LAYERS, num_layers))
            require_numbers(logits[0].cpu().double().numpy(), 0)
            mixture, compute = self._mixture(), None
            if mixture is None:  # equal rows would choose the same experts, and loading them may take long
                self.tiers.restart()
                with self.tiers.layer(0) as self._held:
                    compute = compute_curve(self._passes(slot), self.rows, slot.num_rows, self._stage.total)
        finally:
            self._held = None
            self.tiers.restart()
            self._figures = self.tiers.figures()
        if self.tiers.experts is not None:  # what their bytes take is not known yet
            return SweepTimes(1, most_rows, mixture=mixture)
        speed, num_bytes = self._best_speed.seen(self._figures), self.tiers.placement.link_bytes
        seconds = num_bytes / speed * NANO if speed else 0.0
        return SweepTimes(compute.step if compute else 1, most_rows, compute, num_bytes, seconds, mixture)

    def _mixture(self) -> Mixture | None:
        """The model's experts, and their bytes over the link; None without experts."""
        if not any(map(has_own_products, self.skeleton.model.modules())):
            return None
        placement = self.tiers.placement
        expert_bytes = max(0, placement.expert_bytes - placement.fixed.experts)
        return Mixture(*expert_counts(self.skeleton.config), placement.link_bytes - expert_bytes, expert_bytes)

    def _first_layers(self, slot: Slot, num_rows: int, num_layers: int) -> torch.Tensor:
        """Logits of a root and its children after the first layers alone."""
        tree = Tree.of([0] * num_rows, [-1] + [0] * (num_rows - 1), [0.0] * num_rows)
        num_all, self._num_computed = self._num_computed, num_layers
        try:
            batch = Batch([Segment.tree(slot, 0, tree)], self.rows, self.device)
            return self._logits(batch, self._inputs(batch))
        finally:
            self._num_computed = num_all

    def _passes(self, slot: Slot) -> Callable[[int], PassSeconds]:
        """A function that times a pass of tokens through layer 0."""

        def one_layer(num_tokens: int) -> PassSeconds:
            began = time.perf_counter()
            self._first_layers(slot, num_tokens, 1)
            return PassSeconds(self._layer_seconds, time.perf_counter() - began - self._layer_seconds)

        return one_layer

    def _logits(self, batch: Batch, inputs: dict[str, Any]) -> torch.Tensor:
        output = self._pass(batch, self.skeleton.model, inputs | {"logits_to_keep": batch.logit_rows})
        logits: torch.Tensor = output.logits[0]
        self.best = None if self.device.type == "cpu" else best_tokens(logits, self._read)
        return logits

    def _pass(self, batch: Batch, model: Callable[..., Any], inputs: dict[str, Any]) -> Any:
        kv = self._kv.sweep(batch) if self._num_computed else nullcontext(batch)
        with working_on(self.device), counted_experts() as self._chosen, kv as batch:
            batch.send(self._others)
            self._moved.clear()
            return model(**inputs, position_ids=batch.position_ids, use_cache=False, batch=batch)

    def _read(self, result: torch.Tensor) -> torch.Tensor:
        """A pass's result on the host, and with it the choices of experts that only devices know."""
        tables = [found for found, _ in self._chosen if isinstance(found, torch.Tensor)]
        result, *read = on_host_together([result, *(table.to(result.device, non_blocking=True) for table in tables)])
        counts = map(num_experts_of, read)
        self._chosen = [(next(counts) if isinstance(found, torch.Tensor) else found, k) for found, k in self._chosen]
        return result

    def _inputs(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Input arguments of transformers' forward: tokens, or embeddings looked up on the host."""
        if self._host_embeddings is None:
            return {"input_ids": batch.input_ids}
        return {"inputs_embeds": looked_up(self._host_embeddings, batch, self.device)}

    def _account(self, total_ns: int) -> Timings:
        """A sweep's timings, those of the link since the last sweep."""
        before, self._figures = self._figures, self.tiers.figures()
        link_ns, link_bytes = self._figures.link_ns - before.link_ns, self._figures.link_bytes - before.link_bytes
        speed = self._best_speed.seen(self._figures)
        ideal_ns = round(link_bytes / speed) if speed else 0
        wait_ns = self._figures.wait_ns - before.wait_ns
        chosen = map(sum, zip(*self._chosen, strict=True))
        return Timings(total_ns, 0, wait_ns, total_ns - wait_ns, link_ns, link_bytes, 1, ideal_ns, *chosen)

    def _streamed(self, index: int, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        is_mixture = any(map(has_own_products, self.skeleton.layers[index].modules()))
        kv_place = kv_places(self.skeleton.config)[index]

        def chunk_of(hidden: torch.Tensor, kwargs: dict[str, Any], chunk: Chunk, batch: Batch) -> torch.Tensor:
            with with_rows(chunk.num_tokens):
                return forward(hidden[:, chunk.begin : chunk.end], chunk=chunk, **_narrow(kwargs, chunk, batch))

        def run(hidden_states: torch.Tensor, batch: Batch, **kwargs: Any) -> torch.Tensor:
            if index == 0 and self._received is not None:
                hidden_states = self._received
            if index >= self._num_computed:
                return hidden_states
            self.num_layers_begun += 1
            is_end = index + 1 == self._num_computed
            where = self.tiers.elsewhere.get(index, self.device)
            if self._others:
                hidden_states, kwargs = hidden_states.to(where, non_blocking=True), self._on(where, kwargs)
            arrival = self.tiers.layer(index) if self._held is None else self._timed(self._held)
            kv = self._kv.layer(kv_place) if kv_place >= 0 else nullcontext()
            with arrival as slab, kv, working_on(where):
                place = self._bind(index, slab)
                if self._compiled is not None:
                    end_dtype, rotary = self._end_dtype if is_end else None, kwargs["position_embeddings"]
                    out: torch.Tensor = self._compiled.run(index, place, hidden_states, batch, rotary, end_dtype)
                else:
                    chunks = [partial(chunk_of, hidden_states, kwargs, chunk, batch) for chunk in batch.chunks]
                    parts = routed_together(chunks) if is_mixture else [chunk() for chunk in chunks]
                    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
            if not is_end:
                return out
            out = out.to(self.device, non_blocking=True)
            if self._kept is None:
                return out
            self._kept.append(self._read(out))  # waits: the device's time and errors are those of this pass
            return torch.zeros_like(out, dtype=self.skeleton.dtype)  # what follows in the decoder is not used

        return run

    @property
    def given_dtype(self) -> torch.dtype:
        """Of the hidden states that a stage gets from the one before it."""
        return torch.float32 if self._compiled is not None else self.skeleton.dtype

    @property
    def _end_dtype(self) -> torch.dtype:
        """Of the rows after the last own layer. Compiled layers of further stages continue with unrounded numbers."""
        is_rounded = self._kept is None or self._stage.is_last
        return self.skeleton.dtype if is_rounded else torch.float32

    def _on(self, device: torch.device, kwargs: dict[str, Any]) -> dict[str, Any]:
        """A layer's keyword arguments on the device that computes it. Each tensor is sent at most once in a sweep."""

        def send(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(send, value))
            if not isinstance(value, torch.Tensor) or value.device == device:
                return value
            kept = self._moved.get((id(value), device))  # keeps the original alive: its id must stay unique
            if kept is None:
                kept = self._moved[id(value), device] = (value, value.to(device, non_blocking=True))
            return kept[1]

        return {name: send(value) for name, value in kwargs.items()}

    @contextmanager
    def _timed(self, slab: torch.Tensor) -> Iterator[torch.Tensor]:
        """Replace the arrival of layer 0, and time the computation with it on its device."""
        await_all(self.device)  # rows may have to be copied from there
        await_all(slab.device)
        began = time.perf_counter()
        yield slab
        await_all(slab.device)
        self._layer_seconds = time.perf_counter() - began

    @property
    def arithmetic(self) -> str:
        """Description of the arithmetic, which must be equal for two targets to give the same bits."""
        how = ", layers compiled whole" if self._compiled is not None else ""
        return describe(self.rows, backend_of(self.device)) + how

    def _bind(self, index: int, slab: torch.Tensor) -> LayerAt | None:
        """Bind a layer's parameters to a slab.

        Parameters have the same addresses whenever a layer comes to the same slab, so they are made once and cached;
        those dequantized to shared scratch memory are written again. Returns the cache key, or None if not cached.
        """
        layer, place = self.tiers.layers[index], (index, slab.data_ptr())
        values = self._materialized.get(place)
        if values is None:
            values = layer.materialize(slab, self.skeleton.dtype, self._scratch[slab.device], self._by_matrix)
            if len(self._materialized) < MOST_CACHED:
                self._materialized[place] = values
        else:
            values.write()
        layer.assign(values)
        return place if place in self._materialized else None


def _narrow(kwargs: dict[str, Any], chunk: Chunk, batch: Batch) -> dict[str, Any]:
    """A layer's keyword arguments for one chunk of rows: tensors of shape (1, num_rows, ...) are sliced."""

    def cut(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(cut, value))
        if isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[1] == batch.num_rows:
            return value[:, chunk.begin : chunk.end]
        return value

    return {name: cut(value) for name, value in kwargs.items()}


class PassSeconds(NamedTuple):
    """Seconds of a pass through one layer and the head."""

    layer: float
    rest: float


def compute_curve(
    one_layer: Callable[[int], PassSeconds],
    counts: RowCounts,
    most_tokens: int,
    num_layers: int,
    clock: Callable[[], float] = time.perf_counter,
) -> CostCurve:
    """Predict the seconds of computing in a sweep: the head, plus `num_layers` times one layer.

    `one_layer` passes a number of tokens, at most `most_tokens`, through one layer with a sweep's own kernels and
    threads. All layers are assumed to be equal, with weights that are outside caches or quick to read.
    """
    began, seconds = clock(), dict[int, float]()
    least, most = counts.step, max(counts.step, min(counts.most, most_tokens) // counts.step * counts.step)
    for rows in (least, most, *map(counts.padded, TRIED_ROWS)):
        if rows in seconds or rows > most or (len(seconds) > 1 and clock() - began > ENOUGH_SECONDS):
            continue
        layers, rests = zip(*(one_layer(min(rows, most_tokens)) for _ in range(TIMES)), strict=True)  # padded to `rows`
        seconds[rows] = max(LEAST_SECONDS, min(rests) + min(layers) * num_layers)
    tried = sorted(seconds)
    rising = accumulate((seconds[rows] for rows in tried), max)
    return CostCurve(tuple(tried), tuple(rising), counts.step)


class StreamedSweeper:
    """Sweeps with a model, and gives verdicts from its logits."""

    def __init__(self, model: StreamedModel, grammars: Grammars) -> None:
        self._model, self._grammars, self._reader = model, grammars, RowReader()
        self.rows = model.rows

    def sweep(self, parts: Sequence[Part[VerifyJob]]) -> Swept | SweepInFlight:
        logits, timings = self._model.sweep(self._batch_of(parts))
        return self._swept(parts, logits, timings, self._model.kv_bytes)

    def _batch_of(self, parts: Sequence[Part[VerifyJob]]) -> Batch:
        segments = [segment for part in parts for segment in part.job.segments(part.num_context, part.has_tree)]
        return Batch(segments, self._model.rows, self._model.device)

    def _swept(self, parts: Sequence[Part[VerifyJob]], logits: torch.Tensor, timings: Timings, kv_bytes: int) -> Swept:
        own = self._by_job([part.job for part in parts if part.has_tree], logits)

        def verdict_on(job: VerifyJob) -> Verdict:
            call, rows = replace(job.call, tree=job.tree), own[id(job)]
            grammar, salt = call.sampling.grammar, call.context.cache_salt
            job.session.allowed = allowed = self._grammars.along(grammar, job.session.allowed, salt)
            return compute_verdict(call, job.text.tokens, rows.after, rows.best_after, allowed)

        return Swept(timings, verdict_on, kv_bytes)

    def _by_job(self, jobs: Sequence[VerifyJob], logits: torch.Tensor) -> dict[int, LogitRows]:
        """Each job's rows by the job's `id`; rows are in the order of jobs."""
        sizes, best = [job.num_nodes for job in jobs], self._model.best
        own_best = torch.split(best, sizes) if best is not None else [None] * len(jobs)
        pairs = zip(torch.split(logits, sizes), own_best, strict=True)
        return {id(job): LogitRows(*pair, self._reader) for job, pair in zip(jobs, pairs, strict=True)}

    def warm_up(self, slot: Slot, most_rows: int) -> SweepTimes | None:
        return self._model.warm_up(slot, most_rows)
