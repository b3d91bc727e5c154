"""Assembles a target: checkpoint, link, streamed model, KV slots and engine."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial

from bough.config.processes import TargetConfig
from bough.errors import RingLost
from bough.grammar.allowed_tokens import Grammars
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.checkpoint.model_places import load_tokenizer_files
from bough.model.kv.session_kv import KVArena, KVSlot
from bough.model.sizes.memory_budget import device_budget, host_budget, with_kv_memory, with_sweep_tokens
from bough.model.sizes.target_limits import TargetLimits
from bough.model.threads import compute_reproducibly_with, hand_over_soon
from bough.processes.process import stage
from bough.protocol.generation import WorkerInfo
from bough.sizing.placement import gigabytes
from target_worker.identity.code_hash import code_hash
from target_worker.identity.weights_hash import WeightsHash
from target_worker.kv.slot_pool import SlotPool
from target_worker.scheduler.engine import SweepEngine
from target_worker.service import ServedTarget
from target_worker.stages.head import StageCollector, StagesHead
from target_worker.stages.measured import facts_of, libraries, room_of
from target_worker.stages.remote import StageTimes
from target_worker.stages.slots import LoggedSlot
from target_worker.stages.sweeper import StagedSweeper
from target_worker.sweep.held_layers import HeldLayers, described
from target_worker.sweep.streamed_model import StageLayers, StreamedSweeper

logger = logging.getLogger(__name__)


class TargetWorker(ServedTarget):
    """Owns all resources of a target; closed once."""

    def __init__(self, config: TargetConfig, worker_id: str, stages: StagesHead | None = None) -> None:
        """With `stages` the layers are at several processes, of which this one is the head."""
        hand_over_soon()
        checkpoint = Checkpoint.open(config.model)
        super().__init__(config, worker_id, config.model_name or checkpoint.name)
        self.tokenizer = load_tokenizer_files(checkpoint.path)
        self._weights_hash = WeightsHash(place.file for place in checkpoint.tensors.values())
        self._fingerprint = checkpoint.fingerprint()
        held = HeldLayers(config, checkpoint)
        if held.conversion:
            logger.warning("%s", held.conversion)
        self.vocab_size = held.skeleton.vocab_size
        self.grammars = Grammars(self.tokenizer, self.vocab_size)
        self.max_nodes = config.max_nodes
        self._asked = config
        shape, self._max_positions = held.skeleton.kv_shape(), held.skeleton.max_positions
        held.config = self._config = config = _with_kv_memory(held)
        self._limits = TargetLimits.of(config, self._max_positions, bool(self._asked.max_sweep_tokens))
        self._room = self._limits.room(shape.row_bytes, config.kv_memory, shape.state_bytes)
        self._description = held.skeleton.describe()
        self._stages = stages
        try:
            self.held = held if stages is None else self._head_of(stages, held, checkpoint)
            self.held.place(self._room)
            self.held.compile_kernels()
            stage("reading weights")
            self._start()
        except BaseException:
            self.close()
            raise

    def _head_of(self, stages: StagesHead, whole: HeldLayers, checkpoint: Checkpoint) -> HeldLayers:
        """The head's own layers, once all stages have joined and the layers are divided."""
        self._resources.callback(stages.close)
        stages.admit(facts_of(whole, self._fingerprint, self.tokenizer.fingerprint))
        own = room_of(whole, checkpoint, self._worker_id)
        ranges, room, max_context = stages.split(whole, own, self._room, self._asked)
        shape, self._room = whole.skeleton.kv_shape(), room
        kv_memory = room.num_rows * shape.row_bytes + room.num_states * shape.state_bytes
        self._config = config = replace(whole.config, kv_memory=kv_memory, max_context=max_context)
        self._limits = TargetLimits.of(config, self._max_positions, bool(self._asked.max_sweep_tokens))
        held = HeldLayers(config, checkpoint, StageLayers(0, ranges[0].stop, len(whole.layers)))
        held.config = config
        return held

    def _start(self) -> None:
        """Allocate memory, and start the link and the sweep thread."""
        config, held = self._config, self.held
        self._metrics.name_backend(self._name, held.backend.name)
        held.start(self._resources, self._room)
        stages = self._stages
        kind = KVSlot if stages is None else partial(LoggedSlot, stages.log)
        arena = KVArena(held.skeleton.kv_shape(), held.memory, most_slots=self._room.num_states, kind=kind)
        pool = SlotPool(arena, config.lease_seconds, time.monotonic, self._limits.kv_step)
        sweeper = StreamedSweeper(held.model, self.grammars)
        if stages is not None:
            sweeper = StagedSweeper(held.model, self.grammars, stages.others, stages.spans)
        self._engine = SweepEngine(
            sweeper,
            pool,
            self._limits,
            config.max_waiting,
            config.gather,
            self._metrics.observe,
            lambda: held.model.num_layers_begun + (0 if stages is None else stages.others.progress()),
            (lambda: False) if stages is None else stages.others.lost_kv,
            1 if stages is None else config.sweeps_in_flight,
        )
        self._start_engine(lambda: compute_reproducibly_with(config.threads))
        if stages is not None:
            self._metrics.registry.register(StageCollector(stages, self._name))
            stages.connect()
            with suppress(RingLost):  # then the first call finds that the ring was connected again
                stages.others.lost_kv()  # there are no slots yet that could be lost
        self._weights_hash.require_unchanged()
        self._resources.callback(self._weights_hash.close)
        self._weights_hash.start(lambda: self._engine.idle_seconds)

    def info(self) -> WorkerInfo:
        # the first two decide the order of sums, the third which tokens a grammar allows
        room, stages = self._room, self._stages
        spent = StageTimes() if stages is None else stages.others.last
        parts = (
            self.held.model.arithmetic,
            self.held.devices_in_words()
            + ("" if stages is None else stages.devices_in_words(described(self.held.device))),
            libraries(self.held.device),
            f"code {code_hash(self.held.backend)}",
        )
        return self._info(
            model_description=self._description,
            model_fingerprint=self._fingerprint,
            max_context=self._limits.max_context,
            context_limit=self._context_limit,
            max_sessions=min(room.num_rows // self._limits.slot_rows, room.num_states or room.num_rows),
            link_bytes_per_pass=self.held.placement.link_bytes,
            notes=self._notes(),
            arithmetic=", ".join(parts),
            weights_hash=self._weights_hash.value,
            stages=() if stages is None else stages.statuses(spent),
            stage_network_ns=spent.network_ns,
        )

    @property
    def _context_limit(self) -> str:
        """What keeps sessions below the model's own limit; empty if nothing does."""
        own = self._max_positions
        if self._limits.max_context >= own:
            return ""
        memory = f"--kv-memory of the target, {gigabytes(self._config.kv_memory)}"
        return f"{'--max-context of the target' if self._asked.max_context else memory}; the model's own limit is {own}"

    def trouble(self) -> str:
        return super().trouble() or ("" if self._stages is None else self._stages.trouble())

    def _notes(self) -> tuple[str, ...]:
        notes = [*self.held.notes(), *self._metrics_note]
        if self._stages is not None and (missing := self._stages.trouble()):
            notes.append(f"not usable now: {missing}")
        if self._asked.max_context > self._limits.max_context:
            own = self._limits.max_context
            notes.append(
                f"--max-context: {self._asked.max_context} is more than the model's own limit, {own}, which applies"
            )
        return tuple(notes)


def _with_kv_memory(held: HeldLayers) -> TargetConfig:
    """The settings with the default KV memory and context; all stages are assumed to have as much memory."""
    config, skeleton = held.config, held.skeleton
    host = host_budget(config, held.device.type != "cpu")
    memory = device_budget(config, held.device) * config.stages, host * config.stages
    config = with_sweep_tokens(config, skeleton.config, skeleton.kv_shape(), device_budget(config, held.device))
    return with_kv_memory(config, skeleton.kv_shape(), skeleton.max_positions, *memory)
