"""What a process offers to a target that spans machines, and what must be equal at all of its members."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from typing import NamedTuple

import numba
import torch

from bough import __version__
from bough.config.processes import TargetConfig
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.running.device import gpu_libraries
from bough.model.running.host_embeddings import host_bytes
from bough.model.sizes.hardware_probe import disk_speed, host_link_speed, memory_speed
from bough.model.sizes.memory_budget import (
    device_budget,
    fixed_bytes,
    host_budget,
    layer_kv_bytes,
    resident_bytes,
    stage_buffer_bytes,
)
from bough.model.sizes.target_limits import KVRoom
from bough.sizing.stage_split import StageRoom
from target_worker.identity.code_hash import code_hash
from target_worker.stages.roster import StageFacts
from target_worker.sweep.held_layers import HeldLayers


def facts_of(whole: HeldLayers, checkpoint_fingerprint: str, tokenizer_fingerprint: str) -> StageFacts:
    """What decides tokens, besides the devices, which may be of different kinds."""
    return StageFacts(
        bough_version=__version__,
        code=code_hash(whole.backend),
        checkpoint=checkpoint_fingerprint,
        tokenizer=tokenizer_fingerprint,
        dtype=whole.config.dtype,
        arithmetic=f"backend {whole.backend.name}, {libraries(whole.device)}",
    )


def libraries(device: torch.device) -> str:
    """Versions of libraries that decide bits on a device, or which tokens a grammar allows."""
    found = f"torch {torch.__version__}, numba {numba.__version__}, llguidance {version('llguidance')}"
    return found if device.type == "cpu" else f"{found}, {gpu_libraries()}"


def room_of(whole: HeldLayers, checkpoint: Checkpoint, name: str) -> StageRoom:
    """All memory that this process may use, and its speeds, measured in some seconds."""
    config, device = whole.config, whole.device
    is_gpu = device.type != "cpu"
    has_host_layers = is_gpu and host_budget(config, is_gpu) > 0
    link = host_link_speed(device) if has_host_layers else disk_speed(checkpoint.path, config.link_threads)
    layer_bytes = max(layer.num_bytes for layer in whole.layers)
    seconds = layer_bytes / memory_speed(device).per_second  # a tree has few rows: weights are read once
    threads, kv_on_host = 0 if is_gpu else config.threads, config.kv_tier == "host"
    return StageRoom(name, device_budget(config, device), link.per_second, seconds, threads, kv_on_host)


class Needs(NamedTuple):
    """Memory that a member of a target takes, in addition to its layers."""

    kv_bytes: tuple[int, ...]  # of each of the model's layers
    buffer_bytes: int  # and the head's embeddings

    @classmethod
    def of(cls, whole: HeldLayers, config: TargetConfig, member: StageRoom, room: KVRoom, is_head: bool) -> Needs:
        """The needs of a member with its own settings and the limits of `config`; `whole` is the model at the head."""
        skeleton, is_gpu = whole.skeleton, not member.num_threads
        tier = "host" if member.kv_on_host else "device"
        config = replace(config, kv_tier=tier, threads=member.num_threads)
        scratch = max(layer.scratch_bytes(skeleton.dtype, is_gpu) for layer in whole.layers)
        shape = skeleton.kv_shape()
        kv_bytes = layer_kv_bytes(config, skeleton.config, shape, room)
        if not is_head:
            return cls(kv_bytes, stage_buffer_bytes(config, is_gpu, skeleton.config, shape, scratch, room))
        resident, on_host = resident_bytes(skeleton), host_bytes(skeleton, whole.device.type)
        fixed = fixed_bytes(config, is_gpu, skeleton.config, shape, resident, scratch, on_host, room)
        return cls(kv_bytes, fixed.total - sum(kv_bytes))

    def left(self, member: StageRoom) -> StageRoom:
        """The member with the memory that is left for layers and KV."""
        return member._replace(memory_bytes=max(0, member.memory_bytes - self.buffer_bytes))
