"""What a process offers to a target that spans machines, and what must be equal at all of its members."""

from __future__ import annotations

from importlib.metadata import version
from typing import NamedTuple

import numba
import torch

from bough import __version__
from bough.model.checkpoint.checkpoint import Checkpoint
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
        arithmetic=f"backend {whole.backend.name}, {libraries()}",
    )


def libraries() -> str:
    """Versions of libraries that decide bits, or which tokens a grammar allows."""
    return f"torch {torch.__version__}, numba {numba.__version__}, llguidance {version('llguidance')}"


def room_of(whole: HeldLayers, checkpoint: Checkpoint, name: str) -> StageRoom:
    """All memory that this process may use, and its speeds, measured in some seconds."""
    config, device = whole.config, whole.device
    is_gpu = device.type != "cpu"
    has_host_layers = is_gpu and host_budget(config, is_gpu) > 0
    link = host_link_speed(device) if has_host_layers else disk_speed(checkpoint.path, config.link_threads)
    layer_bytes = max(layer.num_bytes for layer in whole.layers)
    seconds = layer_bytes / memory_speed(device).per_second  # a tree has few rows: weights are read once
    return StageRoom(name, device_budget(config, device), link.per_second, seconds)


class Needs(NamedTuple):
    """Memory that a model takes at the members of a target, with the settings of its head."""

    layer_bytes: list[int]
    kv_bytes: tuple[int, ...]  # of each layer
    at_head: int  # in addition to layers and KV
    at_stage: int

    @classmethod
    def of(cls, whole: HeldLayers) -> Needs:
        """The needs of a whole model."""
        config, skeleton, is_gpu = whole.config, whole.skeleton, whole.device.type != "cpu"
        scratch = max(layer.scratch_bytes(skeleton.dtype, is_gpu) for layer in whole.layers)
        model = is_gpu, skeleton.config, skeleton.kv_shape()
        on_host = host_bytes(skeleton, whole.device.type)
        fixed = fixed_bytes(config, *model, resident_bytes(skeleton), scratch, on_host)
        kv_bytes = layer_kv_bytes(config, skeleton.config, skeleton.kv_shape())
        at_head = fixed.total - sum(kv_bytes)
        sizes = [layer.num_bytes for layer in whole.layers]
        return cls(sizes, kv_bytes, at_head, stage_buffer_bytes(config, *model, scratch))
