"""Assembles a target: checkpoint, link, streamed model, KV slots and engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numba
import torch

from bough.config.processes import TargetConfig
from bough.errors import AcceleratorFull, ConfigError
from bough.grammar.allowed_tokens import Grammars
from bough.model.architecture.architecture import load_config
from bough.model.backend import REFERENCE_NOTE, backend_of, choose_backend
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.checkpoint.model_places import load_tokenizer_files
from bough.model.faults import named_faults
from bough.model.kernel_cache import compiled_key
from bough.model.kv.session_kv import KVArena, split_memory
from bough.model.kv.states import by_kv_place
from bough.model.loading.default_settings import conversion, settled
from bough.model.loading.loading import DTYPES, build_skeleton
from bough.model.running.device import choose_device
from bough.model.running.host_embeddings import host_bytes
from bough.model.sizes.memory_budget import (
    budgets,
    device_budget,
    fixed_bytes,
    free_device_bytes,
    host_budget,
    other_devices,
    require_way_through,
    resident_bytes,
    with_kv_memory,
)
from bough.model.sizes.target_limits import TargetLimits
from bough.model.threads import compute_reproducibly_with, hand_over_soon, on_a_passing_thread
from bough.processes.compile_once import compile_in_subprocess
from bough.processes.process import stage
from bough.protocol.generation import WorkerInfo
from bough.sizing.placement import Fixed, OtherDevice, Placement, SeparateExperts, Tier, gigabytes, place_with
from target_worker.identity.code_hash import code_hash
from target_worker.identity.weights_hash import WeightsHash
from target_worker.kv.kv_offload import KVHome, OffloadedKV, memory_on_host
from target_worker.kv.slot_pool import SlotPool
from target_worker.link.layer_extents import LayerExperts, plan_apart, plan_layer, sizes_apart
from target_worker.link.streams import DeviceStreams
from target_worker.scheduler.engine import SweepEngine
from target_worker.service import ServedTarget
from target_worker.sweep.streamed_model import StreamedModel, StreamedSweeper
from target_worker.sweep.tiers import Tiers, streams_of

logger = logging.getLogger(__name__)


def compile_target(dtype: str, layers: str) -> bool:
    """Compile the kernels of CPU sweeps, as `compile_once` does; arguments as of `target_worker.sweep.kernels`."""
    return compile_in_subprocess("target_worker.sweep.kernels", [dtype, layers], compiled_key(Path(__file__).parent))


def _described(device: torch.device) -> str:
    return backend_of(device).describe(device)


class TargetWorker(ServedTarget):
    """Owns all resources of a target; closed once."""

    def __init__(self, config: TargetConfig, worker_id: str) -> None:
        hand_over_soon()
        checkpoint = Checkpoint.open(config.model)
        super().__init__(config, worker_id, config.model_name or checkpoint.name)
        self.tokenizer = load_tokenizer_files(checkpoint.path)
        self._weights_hash = WeightsHash(place.file for place in checkpoint.tensors.values())
        self._fingerprint = checkpoint.fingerprint()
        self._device = choose_device(config.device)
        backend = choose_backend(config.backend, self._device)
        backend.make_ready(self._device)
        self._config = config = settled(config, load_config(checkpoint.path), self._device.type)
        self._skeleton = build_skeleton(checkpoint, DTYPES[config.dtype])
        self._conversion = conversion(checkpoint.tensors.values(), self._skeleton.dtype)
        if self._conversion:
            logger.warning("%s", self._conversion)
        self.layers = tuple(plan_layer(f"layer {i}", slots) for i, slots in enumerate(self._skeleton.layer_slots))
        self._experts: dict[int, LayerExperts] = {}  # by layer; `layers` are then without their experts
        self.vocab_size = self._skeleton.vocab_size
        self.grammars = Grammars(self.tokenizer, self.vocab_size)
        self.max_nodes = config.max_nodes
        self._asked_context = config.max_context
        self._config = config = self._with_kv_memory(config)
        self._limits = TargetLimits.of(config, self._skeleton.max_positions)
        shape = self._skeleton.kv_shape()
        room = shape.row_bytes, config.kv_memory, shape.state_bytes
        self._num_rows, self._num_states = self._limits.num_rows(*room), self._limits.num_states(*room)
        self._placement = self._place()
        if backend.compiles_ahead:
            packing = self._skeleton.quantization
            is_whole = backend.compiles(self._skeleton) and (packing is None or not packing.is_transposed)
            compile_target(config.dtype, "recurrent" if shape.states else "whole" if is_whole else "attention")
        stage("reading weights")
        try:
            self._start_within_memory()
        except BaseException:
            self.close()
            raise

    def _start_within_memory(self) -> None:
        """Start. Raises ConfigError if other processes took memory of a GPU since its use was planned."""
        try:
            with named_faults(self._device, tuple(dict.fromkeys(self._elsewhere.values()))):
                self._start()
        except AcceleratorFull as exc:
            given = gigabytes(self._config.device_memory) if self._config.device_memory else "none"
            raise ConfigError(
                f"--device-memory: must be less than what is free on {self._device}, got {given}: {exc}; give a "
                "smaller one, or a smaller --kv-memory, or --device-reserve for others"
            ) from exc

    def _start(self) -> None:
        """Allocate memory, and start the link and the sweep thread."""
        config = self._config
        pool, kv = self._make_pool()
        streams, elsewhere = streams_of(self._device), self._elsewhere
        self._tiers = Tiers(self.layers, self._placement, config.link_threads, streams, self._experts, elsewhere)
        tiers = self._resources.enter_context(self._tiers)
        self._model = on_a_passing_thread(lambda: StreamedModel(self._skeleton, tiers, config.rows, self._device, kv))
        model, waiting, observe = self._model, config.max_waiting, self._metrics.observe
        self._engine = SweepEngine(
            StreamedSweeper(model, self.grammars),
            pool,
            self._limits,
            waiting,
            config.gather,
            observe,
            lambda: model.num_layers_begun,
        )
        self._start_engine(lambda: compute_reproducibly_with(config.threads))
        self._weights_hash.require_unchanged()
        self._resources.callback(self._weights_hash.close)
        self._weights_hash.start(lambda: self._engine.idle_seconds)

    def info(self) -> WorkerInfo:
        # the first two decide the order of sums, the third which tokens a grammar allows
        libraries = f"torch {torch.__version__}, numba {numba.__version__}, llguidance {version('llguidance')}"
        parts = (
            self._model.arithmetic,
            self._devices_in_words(),
            libraries,
            f"code {code_hash(backend_of(self._device))}",
        )
        return self._info(
            model_description=self._skeleton.describe(),
            model_fingerprint=self._fingerprint,
            max_context=self._limits.max_context,
            context_limit=self._context_limit,
            max_sessions=min(self._num_rows // self._limits.slot_rows, self._num_states or self._num_rows),
            link_bytes_per_pass=self._placement.link_bytes,
            notes=self._notes(),
            arithmetic=", ".join(parts),
            weights_hash=self._weights_hash.value,
        )

    @property
    def _context_limit(self) -> str:
        """What keeps sessions below the model's own limit; empty if nothing does."""
        own = self._skeleton.max_positions
        if self._limits.max_context >= own:
            return ""
        memory = f"--kv-memory of the target, {gigabytes(self._config.kv_memory)}"
        return f"{'--max-context of the target' if self._asked_context else memory}; the model's own limit is {own}"

    def _devices_in_words(self) -> str:
        """Devices that compute; targets that compute layers on different kinds of GPUs give different bits."""
        own, others = _described(self._device), {i: _described(d) for i, d in self._elsewhere.items()}
        kinds = {name: [i for i in others if others[i] == name] for name in others.values() if name != own}
        return own + "".join(f", layers {layers} on {name}" for name, layers in sorted(kinds.items()))

    def _notes(self) -> tuple[str, ...]:
        quantization = self._skeleton.quantization
        texts = self._memory_in_words, self._conversion, quantization.note if quantization is not None else ""
        notes = [text for text in texts if text]
        if self._asked_context > self._limits.max_context:
            own = self._limits.max_context
            notes.append(
                f"--max-context: {self._asked_context} is more than the model's own limit, {own}, which applies"
            )
        if self._experts:
            notes.append(f"experts are loaded when rows choose them: {gigabytes(self._placement.expert_bytes)} in all")
        if self._device.type != "cpu":
            notes.append(f"computes on {self._device}, {_described(self._device)}")
        for other in dict.fromkeys(self._elsewhere.values()):
            count = sum(device == other for device in self._elsewhere.values())
            notes.append(f"{count} layers are stored and computed on {other}, {_described(other)}")
        unpinned = self._tiers.unpinned_bytes + sum(streams.unpinned_bytes for streams in self._kv_streams.values())
        if unpinned:
            notes.append(
                f"{gigabytes(unpinned)} of host memory could not be pinned, which slows copies from there to the GPU"
            )
        if not self._tiers.is_direct:
            notes.append("reads go through the page cache: the file system refuses O_DIRECT")
        notes.append(f"{self._model.arithmetic}: a row's bits do not depend on the other rows of a sweep")
        notes += [REFERENCE_NOTE] if self._config.backend == "reference" else []
        notes += self._metrics_note
        if unused := self._skeleton.unused:
            notes.append(f"{len(unused)} tensors of the checkpoint have no place in it, such as {unused[0]}")
        return tuple(notes)

    def _with_kv_memory(self, config: TargetConfig) -> TargetConfig:
        host = host_budget(config, self._device.type != "cpu")
        shape, num_positions = self._skeleton.kv_shape(), self._skeleton.max_positions
        return with_kv_memory(config, shape, num_positions, device_budget(config, self._device), host)

    def _make_pool(self) -> tuple[SlotPool, KVHome]:
        """The slot pool, and where sweeps find its keys and values."""
        shape, num_rows = self._skeleton.kv_shape(), self._num_rows
        num_bytes = num_rows * shape.row_bytes
        logger.info("KV of %d tokens, %.2f GB on the %s", num_rows, num_bytes / 1e9, self._config.kv_tier)
        home, kv_elsewhere = KVHome(), by_kv_place(self._skeleton.config, self._elsewhere)
        self._kv_streams = self._streams_for_kv()
        if self._kv_streams:
            elsewhere = {layer: self._kv_streams[device] for layer, device in kv_elsewhere.items()}
            where = shape, num_rows, self._kv_streams[self._device], elsewhere
            memory, home = memory_on_host(*where), OffloadedKV(*where)
        else:
            memory = split_memory(shape, num_rows, self._device, kv_elsewhere)
        arena = KVArena(shape, memory, most_slots=self._num_states)
        return SlotPool(arena, self._config.lease_seconds, time.monotonic, self._limits.kv_step), home

    def _streams_for_kv(self) -> dict[torch.device, DeviceStreams]:
        """Streams of every GPU that copies KV from the host; none if the KV is on the GPUs."""
        if self._config.kv_tier != "host":
            return {}
        devices = dict.fromkeys((self._device, *self._elsewhere.values()))
        found = {device: streams for device in devices if (streams := streams_of(device)) is not None}
        for streams in found.values():
            self._resources.callback(streams.close)
        return found

    def _place(self) -> Placement:
        """Decide where each layer is stored, and log it."""
        config, skeleton = self._config, self._skeleton
        is_gpu = self._device.type != "cpu"
        scratch = max(layer.scratch_bytes(skeleton.dtype, is_gpu) for layer in self.layers)
        sizes = resident_bytes(skeleton), scratch, host_bytes(skeleton, self._device.type)
        fixed = fixed_bytes(config, is_gpu, skeleton.config, skeleton.kv_shape(), *sizes)
        apart, experts = plan_apart(skeleton.layer_slots)
        parts = sizes_apart(apart, experts, skeleton.dtype, is_gpu) if experts else None
        layer_bytes = [layer.num_bytes for layer in self.layers]
        shape, count = skeleton.kv_shape(), torch.cuda.device_count()
        others = other_devices(config, skeleton.config, shape, scratch, str(self._device), count)
        placement, self._memory_in_words = choose_places(layer_bytes, fixed, config, self._device, parts, others)
        devices = [torch.device(others[number].name) for number in placement.others]
        self._elsewhere = dict(zip(placement.layers(Tier.ELSEWHERE), devices, strict=True))
        for other in dict.fromkeys(devices):
            backend_of(other).make_ready(other)
        if placement.expert_bytes:
            self.layers = tuple((self.layers if i in self._elsewhere else apart)[i] for i in range(len(apart)))
            self._experts = {i: own for i, own in experts.items() if i not in self._elsewhere}
        return placement


class Places(NamedTuple):
    """A placement, and a description of the memory budget and its uses."""

    placement: Placement
    words: str


def choose_places(
    layer_bytes: Sequence[int],
    fixed: Fixed,
    config: TargetConfig,
    device: torch.device,
    apart: SeparateExperts | None = None,
    others: Sequence[OtherDevice] = (),
) -> Places:
    """Place each layer, with its experts, or without them if they have a cache (`Fixed.experts`).

    Experts get a cache if not everything fits in memory; on a device with its own memory, only if host memory holds
    all experts. Layers that stay on `others` keep their experts. Raises ConfigError naming the setting that leaves too
    little memory, or does not apply to this device.
    """
    _require_free(others)
    free, is_gpu = free_device_bytes(device), device.type != "cpu"
    device_bytes = device_budget(config, device)
    allowed = budgets(config, layer_bytes, device_bytes, host_budget(config, is_gpu))
    parts = apart if config.experts != "all" else None
    placement = place_with(layer_bytes, fixed, allowed, others, parts, is_gpu, config.experts == "chosen")
    require_way_through(placement, is_gpu, allowed.host)
    origin = (
        "as configured"
        if config.device_memory
        else f"of the {gigabytes(free)} that are free; the rest is left to others"
    )
    on_host = f", {gigabytes(allowed.host)} of the host's" if allowed.host else ""
    words = f"memory: {gigabytes(allowed.device)} ({origin}){on_host}; {placement}; {placement.fixed}"
    logger.info("%s", words)
    return Places(placement, words)


def _require_free(others: Sequence[OtherDevice]) -> None:
    """Raises ConfigError if another accelerator has less memory than is asked of it."""
    for other in others:
        free = free_device_bytes(torch.device(other.name))
        if other.budget > free:
            raise ConfigError(
                f"--resident-devices: {other.name} must be at most the {gigabytes(free)} that are free there, got "
                f"{gigabytes(other.budget)}"
            )
