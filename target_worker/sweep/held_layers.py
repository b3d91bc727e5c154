"""Layers of a model at one process: where they are stored, memory for their KV, and the model that runs them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from bough.config.processes import TargetConfig
from bough.errors import AcceleratorFull, ConfigError
from bough.model.architecture.architecture import load_config
from bough.model.backend import backend_of, choose_backend
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.faults import named_faults
from bough.model.kernel_cache import compiled_key
from bough.model.kv.session_kv import KVMemory, split_memory
from bough.model.kv.states import by_kv_place
from bough.model.loading.default_settings import conversion, settled
from bough.model.loading.loading import DTYPES, build_skeleton
from bough.model.running.device import choose_device, require_fast
from bough.model.running.host_embeddings import host_bytes
from bough.model.running.self_check import backend_notes, checked_backend
from bough.model.sizes.memory_budget import (
    budgets,
    device_budget,
    fixed_bytes,
    free_device_bytes,
    host_budget,
    other_devices,
    require_way_through,
    resident_bytes,
)
from bough.model.sizes.target_limits import KVRoom
from bough.model.threads import on_a_passing_thread
from bough.processes.compile_once import compile_in_subprocess
from bough.sizing.placement import Fixed, OtherDevice, Placement, SeparateExperts, Tier, gigabytes, place_with
from target_worker.kv.kv_offload import KVHome, OffloadedKV, memory_on_host
from target_worker.link.layer_extents import LayerExperts, plan_apart, plan_layer, sizes_apart
from target_worker.link.streams import DeviceStreams
from target_worker.sweep.streamed_model import StageLayers, StreamedModel
from target_worker.sweep.tiers import Tiers, streams_of

logger = logging.getLogger(__name__)

TARGET_FOLDER = Path(__file__).parents[1]


def compile_target(dtype: str, layers: str) -> bool:
    """Compile the kernels of CPU sweeps, as `compile_once` does; arguments as of `target_worker.sweep.kernels`."""
    return compile_in_subprocess("target_worker.sweep.kernels", [dtype, layers], compiled_key(TARGET_FOLDER))


def described(device: torch.device) -> str:
    """Description of a device's arithmetic."""
    return backend_of(device).describe(device)


@contextmanager
def within_memory(config: TargetConfig, device: torch.device, others: Sequence[torch.device]) -> Iterator[None]:
    """Allocate memory within the block. Raises ConfigError if other processes took some since its use was planned."""
    try:
        with named_faults(device, others):
            yield
    except AcceleratorFull as exc:
        given = gigabytes(config.device_memory) if config.device_memory else "none"
        raise ConfigError(
            f"--device-memory: must be less than what is free on {device}, got {given}: {exc}; give a "
            "smaller one, or a smaller --kv-memory, or --device-reserve for others"
        ) from exc


class HeldLayers:
    """Consecutive layers of a model: all of a target's, or those of a stage.

    First the model is built without weights, which tells sizes. `place` decides where layers are stored, and `start`
    allocates memory and reads them.
    """

    model: StreamedModel  # after `start`
    memory: KVMemory  # of keys and values, after `start`
    memory_in_words: str  # the budget and its uses, after `place`
    placement: Placement  # after `place`

    def __init__(self, config: TargetConfig, checkpoint: Checkpoint, stage: StageLayers | None = None) -> None:
        """`stage` has the layers to hold; by default all. Raises what `build_skeleton` and `choose_device` raise."""
        self.device = choose_device(config.device)
        if stage is None:  # otherwise the whole model was here before
            choose_backend(config.backend, self.device)
        self.config = settled(config, load_config(checkpoint.path), self.device.type)
        require_fast(self.config.dtype, self.device)
        self.stage = stage
        kept = None if stage is None else tuple(range(stage.first, stage.end))
        self.skeleton = build_skeleton(checkpoint, DTYPES[self.config.dtype], kept)
        if stage is None:
            others = (torch.device(name) for name, _ in config.resident_devices)
            there = [other for other in others if other.index < torch.cuda.device_count()]  # `place` refuses the rest
            checked_backend(config.backend, [self.device, *there], self.skeleton)
        self.backend = backend_of(self.device)
        if self.backend.name == "reference":  # whose rows are fewer, whoever chose it
            self.config = settled(replace(config, backend="reference"), load_config(checkpoint.path), self.device.type)
        self.conversion = conversion(checkpoint.tensors.values(), self.skeleton.dtype)
        self.layers = tuple(plan_layer(f"layer {i}", slots) for i, slots in enumerate(self.skeleton.layer_slots))
        self._experts: dict[int, LayerExperts] = {}  # by layer; `layers` are then without their experts
        self._kv_streams: dict[torch.device, DeviceStreams] = {}
        self._elsewhere: dict[int, torch.device] = {}

    def place(self, room: KVRoom) -> None:
        """Decide where each layer is stored, and log it. Raises ConfigError if memory is too small."""
        config, skeleton = self.config, self.skeleton
        is_gpu = self.device.type != "cpu"
        scratch = max(layer.scratch_bytes(skeleton.dtype, is_gpu) for layer in self.layers)
        shape, has_head = skeleton.kv_shape(), self.stage is None or self.stage.is_first
        resident = resident_bytes(skeleton) if has_head else 0
        on_host = host_bytes(skeleton, self.device.type) if has_head else 0
        fixed = fixed_bytes(config, is_gpu, skeleton.config, shape, resident, scratch, on_host, room, has_head)
        apart, experts = plan_apart(skeleton.layer_slots)
        parts = sizes_apart(apart, experts, skeleton.dtype, is_gpu) if experts else None
        layer_bytes = [layer.num_bytes for layer in self.layers]
        count = torch.cuda.device_count()
        others = other_devices(config, skeleton.config, shape, scratch, str(self.device), count, room)
        self.placement, self.memory_in_words = choose_places(layer_bytes, fixed, config, self.device, parts, others)
        devices = [torch.device(others[number].name) for number in self.placement.others]
        self._elsewhere = dict(zip(self.placement.layers(Tier.ELSEWHERE), devices, strict=True))
        for other in self.other_devices:
            require_fast(config.dtype, other)
            backend_of(other).make_ready(other)
        if self.placement.expert_bytes:
            self.layers = tuple((self.layers if i in self._elsewhere else apart)[i] for i in range(len(apart)))
            self._experts = {i: own for i, own in experts.items() if i not in self._elsewhere}

    def compile_kernels(self) -> None:
        """Compile CPU kernels ahead, in another process, unless they are cached."""
        if not self.backend.compiles_ahead:
            return
        packing = self.skeleton.quantization
        is_whole = self.backend.compiles(self.skeleton) and (packing is None or not packing.is_transposed)
        has_states = self.skeleton.kv_shape().states is not None
        compile_target(self.config.dtype, "recurrent" if has_states else "whole" if is_whole else "attention")

    def start(self, resources: ExitStack, room: KVRoom) -> None:
        """Allocate memory, read resident layers and start the link; `resources` get what is to be closed.

        Raises ConfigError as `within_memory` does.
        """
        config = self.config
        with within_memory(config, self.device, self.other_devices):
            kv = self._make_memory(resources, room.num_rows)
            streams, elsewhere = streams_of(self.device), self._elsewhere
            tiers = Tiers(self.layers, self.placement, config.link_threads, streams, self._experts, elsewhere)
            self._tiers = resources.enter_context(tiers)
            self.model = on_a_passing_thread(
                lambda: StreamedModel(self.skeleton, tiers, config.rows, self.device, kv, self.stage)
            )

    def _make_memory(self, resources: ExitStack, num_rows: int) -> KVHome:
        """Allocate the KV memory; returns where sweeps find keys and values."""
        shape = self.skeleton.kv_shape()
        num_bytes = num_rows * shape.row_bytes
        logger.info("KV of %d tokens, %.2f GB on the %s", num_rows, num_bytes / 1e9, self.config.kv_tier)
        kv_elsewhere = by_kv_place(self.skeleton.config, self._elsewhere)
        self._kv_streams = self._streams_for_kv(resources)
        if self._kv_streams:
            elsewhere = {layer: self._kv_streams[device] for layer, device in kv_elsewhere.items()}
            where = shape, num_rows, self._kv_streams[self.device], elsewhere
            self.memory = memory_on_host(*where)
            return OffloadedKV(*where)
        self.memory = split_memory(shape, num_rows, self.device, kv_elsewhere)
        return KVHome()

    def _streams_for_kv(self, resources: ExitStack) -> dict[torch.device, DeviceStreams]:
        """Streams of every GPU that copies KV from the host; none if the KV is on the GPUs, or no layer has any."""
        if self.config.kv_tier != "host" or not self.skeleton.kv_shape().num_layers:
            return {}
        devices = dict.fromkeys((self.device, *self._elsewhere.values()))
        found = {device: streams for device in devices if (streams := streams_of(device)) is not None}
        for streams in found.values():
            resources.callback(streams.close)
        return found

    @property
    def other_devices(self) -> tuple[torch.device, ...]:
        """Further devices that store and compute layers."""
        return tuple(dict.fromkeys(self._elsewhere.values()))

    def devices_in_words(self) -> str:
        """Devices that compute; targets that compute layers on different kinds of GPUs give different bits."""
        own, others = described(self.device), {i: described(d) for i, d in self._elsewhere.items()}
        kinds = {name: [i for i in others if others[i] == name] for name in others.values() if name != own}
        return own + "".join(f", layers {layers} on {name}" for name, layers in sorted(kinds.items()))

    def notes(self) -> Iterator[str]:
        """What a user should know about memory, devices and the checkpoint."""
        quantization = self.skeleton.quantization
        texts = self.memory_in_words, self.conversion, quantization.note if quantization is not None else ""
        yield from (text for text in texts if text)
        if self._experts:
            yield f"experts are loaded when rows choose them: {gigabytes(self.placement.expert_bytes)} in all"
        if self.device.type != "cpu":
            yield f"computes on {self.device}, {described(self.device)}"
        for other in self.other_devices:
            count = sum(device == other for device in self._elsewhere.values())
            yield f"{count} layers are stored and computed on {other}, {described(other)}"
        unpinned = self._tiers.unpinned_bytes + sum(streams.unpinned_bytes for streams in self._kv_streams.values())
        if unpinned:
            yield f"{gigabytes(unpinned)} of host memory could not be pinned, which slows copies from there to the GPU"
        if not self._tiers.is_direct:
            yield "reads go through the page cache: the file system refuses O_DIRECT"
        yield f"{self.model.arithmetic}: a row's bits do not depend on the other rows of a sweep"
        yield from backend_notes(self.device)
        if unused := self.skeleton.unused:
            yield f"{len(unused)} tensors of the checkpoint have no place in it, such as {unused[0]}"


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
