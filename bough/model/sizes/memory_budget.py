"""How much memory there is to take, and what a sweep takes beside weights and KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from transformers import PretrainedConfig

from bough.config.processes import TargetConfig
from bough.errors import ConfigError
from bough.model.architecture.architecture import max_positions
from bough.model.gpu.kernels import kernels_on
from bough.model.kv.session_kv import KVShape
from bough.model.loading.loading import Skeleton
from bough.model.quant.format import BLOCK_BYTES, BLOCK_ELEMENTS
from bough.model.sizes.target_limits import TargetLimits
from bough.runtime.kv_budget import kv_budget
from bough.runtime.machine import default_budget, free_memory
from bough.sizing.other_devices import OtherDevice
from bough.sizing.placement import MIN_SLABS, STAGED_LAYERS, Budgets, Fixed, Placement, Tier, gigabytes
from bough.sizing.row_counts import OWN_MOST

Target = TypeVar("Target", bound=TargetConfig)

RING_BYTES = 512 * 1000**2  # or RING_LAYERS, where those are more: what a ring takes unless it is told
RING_LAYERS = 3  # one that is computed on, one that arrives, one that has; more is better used for layers that stay
HIDDEN_COPIES = 8  # of a batch's hidden states at once: residuals, norms, queries, attention's result, rotary tables
GPU_SHARE = 0.95  # of what is free once libraries have theirs: on a GPU nobody else comes, but the allocator rounds up
FLOAT32_BYTES, FLOAT64_BYTES = 4, 8


def free_device_bytes(device: torch.device) -> int:
    """What this process may still take of an accelerator's memory; on the CPU, that is the host's."""
    return free_memory() if device.type == "cpu" else int(torch.cuda.mem_get_info(device)[0])


def whole_device_bytes(device: torch.device) -> int:
    """Of an accelerator's memory, whoever has it."""
    return int(torch.cuda.mem_get_info(device)[1])


def host_budget(settings: TargetConfig, is_gpu: bool) -> int:
    """Bytes of the host's memory for layers: as told, or most of what is free; 0 where the host is the accelerator.

    Raises:
        ConfigError: told where there is no such memory.
    """
    if is_gpu:
        return settings.host_memory or default_budget(free_memory())
    if settings.host_memory:
        raise ConfigError(
            f"--host-memory: {gigabytes(settings.host_memory)}; on the CPU host and device have one memory, "
            "which --device-memory limits"
        )
    return 0


def device_budget(settings: TargetConfig, device: torch.device) -> int:
    """Bytes of the accelerator's memory for the model, KV and all: as told, or most of what is free.

    Raises:
        ConfigError: all of it is another's.
    """
    if settings.device_memory:
        return settings.device_memory
    free = free_device_bytes(device)
    if device.type == "cpu":
        return default_budget(free)
    if not settings.device_reserve:
        return int(GPU_SHARE * free)
    whole = whole_device_bytes(device) - settings.device_reserve
    if whole <= 0:
        raise ConfigError(
            f"--device-reserve: value was {gigabytes(settings.device_reserve)}; must be less than {device} has, "
            f"{gigabytes(whole_device_bytes(device))}"
        )
    return int(GPU_SHARE * min(free, whole))


def with_kv_memory(settings: Target, shape: KVShape, num_positions: int, device: int, host: int) -> Target:
    """The same settings, with memory for KV where that is not told: by `device` and `host`, bytes that may be taken.

    Raises:
        ConfigError: it is told twice.
    """
    if settings.kv_memory and settings.kv_sessions:
        raise ConfigError(
            f"--kv-sessions: value was {settings.kv_sessions}; must not be given beside --kv-memory "
            f"({gigabytes(settings.kv_memory)}), which says the same in bytes"
        )
    if settings.kv_memory:
        return settings
    session_bytes = TargetLimits.of(settings, num_positions).slot_rows * shape.row_bytes
    if settings.kv_sessions:
        return replace(settings, kv_memory=settings.kv_sessions * session_bytes)
    return replace(settings, kv_memory=kv_budget(session_bytes, host if settings.kv_tier == "host" else device))


def require_way_through(placement: Placement, is_gpu: bool, host: int) -> None:
    """That layers come from disk to a GPU: through pinned memory, of which `host` bytes are for layers.

    Raises:
        ConfigError: it does not hold as many of them as it takes.
    """
    if is_gpu and placement.layers(Tier.DISK) and not placement.num_host_slabs:
        least = placement.fixed.on_host + MIN_SLABS * placement.slab_bytes
        raise ConfigError(
            f"--host-memory: {gigabytes(host)}; layers pass from disk to the GPU through pinned memory, which "
            f"must hold {MIN_SLABS}: {gigabytes(least)} or more would do"
        )


def fixed_bytes(
    settings: TargetConfig,
    is_gpu: bool,
    config: PretrainedConfig,
    shape: KVShape,
    resident: int,
    scratch: int,
    embeddings: int = 0,
) -> Fixed:
    """What a target with these settings takes wherever its layers live, `resident` and `scratch` bytes of it.

    Of those that are resident, `embeddings` bytes are on the host.

    Raises:
        ConfigError: the memory for KV holds no session, or is to be where there is none.
    """
    if settings.kv_tier == "host" and not is_gpu:
        raise ConfigError("--kv-tier: host; on the CPU host and device have one memory: only device would do")
    limits = TargetLimits.of(settings, max_positions(config))
    kv = limits.num_rows(shape.row_bytes, settings.kv_memory) * shape.row_bytes
    staged, on_host = (kv, 0) if settings.kv_tier == "device" else (STAGED_LAYERS * kv // shape.num_layers, kv)
    activations = activation_bytes(config, shape, limits)
    return Fixed(resident - embeddings, staged, activations, scratch, on_host, host_embeddings=embeddings)


def other_devices(
    settings: TargetConfig, config: PretrainedConfig, shape: KVShape, scratch: int, device: str, count: int
) -> list[OtherDevice]:
    """Those on which layers of the target stay; `count` GPUs are here, and sweeps go through `device`.

    Raises:
        ConfigError: one is not there, or is the target's own.
    """
    if not settings.resident_devices:
        return []
    told = ",".join(f"{name}={num_bytes}" for name, num_bytes in settings.resident_devices)
    limits = TargetLimits.of(settings, max_positions(config))
    kv = limits.num_rows(shape.row_bytes, settings.kv_memory) * shape.row_bytes // shape.num_layers  # of a layer
    layer_kv, staged = (0, STAGED_LAYERS * kv) if settings.kv_tier == "host" else (kv, 0)
    fixed = layer_activation_bytes(config, shape, limits) + scratch + staged
    hop = _sweep_rows(limits) * hidden_bytes(config, shape.dtype)
    for name, _ in settings.resident_devices:
        if name == device or int(name.removeprefix("cuda:")) >= count:
            there = (
                ", ".join(f"cuda:{i}" for i in range(count) if f"cuda:{i}" != device) or "nothing: there is no other"
            )
            raise ConfigError(f"--resident-devices: value was {told}; must be of {there}")
    return [OtherDevice(name, num_bytes, fixed, layer_kv, hop) for name, num_bytes in settings.resident_devices]


def budgets(settings: TargetConfig, layer_bytes: Sequence[int], device: int, host: int) -> Budgets:
    """What a target with these settings may take; `device` and `host` in bytes."""
    return Budgets(
        device=device,
        host=host,
        ring=settings.ring_memory or max(RING_BYTES, RING_LAYERS * max(layer_bytes)),
        max_resident=len(layer_bytes) if settings.resident_layers < 0 else settings.resident_layers,
    )


def activation_bytes(config: PretrainedConfig, shape: KVShape, limits: TargetLimits) -> int:
    """What a sweep takes at most beside weights and slots; an estimate from above (tests/model/test_memory.py)."""
    size, vocab_size = shape.dtype.itemsize, int(config.vocab_size)
    head = _sweep_rows(limits) * vocab_size * size * 2  # in parts, then in one piece
    judged = 8 * vocab_size * FLOAT64_BYTES  # a row at a time
    return layer_activation_bytes(config, shape, limits) + head + judged


def hidden_bytes(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Of a row's hidden state."""
    return int(config.hidden_size) * dtype.itemsize


def _sweep_rows(limits: TargetLimits) -> int:
    """Of the largest sweep, padding included."""
    rows = max(limits.rows, OWN_MOST)
    return -(-limits.max_sweep_tokens // rows) * rows


def layer_activation_bytes(config: PretrainedConfig, shape: KVShape, limits: TargetLimits) -> int:
    """Of that, what a device takes that has layers and no output head."""
    size, rows, tokens = shape.dtype.itemsize, max(limits.rows, OWN_MOST), _sweep_rows(limits)
    hidden = tokens * hidden_bytes(config, shape.dtype) * HIDDEN_COPIES
    intermediate = rows * int(getattr(config, "intermediate_size", 4 * config.hidden_size)) * size * 4
    attention = 2 * limits.slot_rows * shape.num_kv_heads * shape.head_dim * FLOAT32_BYTES
    return hidden + intermediate + attention


def unpacking_bytes(skeleton: Skeleton, device: torch.device) -> int:
    """What unpacking takes for a moment where no kernel of ours does it; nothing on the CPU, or where Triton is."""
    has_kernels = device.type == "cpu" or kernels_on(device) is not None
    return 0 if has_kernels or skeleton.quantization is None else BLOCK_ELEMENTS * BLOCK_BYTES


def resident_bytes(skeleton: Skeleton) -> int:
    """Embeddings, final norm and output head, each tensor once."""
    shapes = {slot.source.places: slot.source.shape for slot in skeleton.resident_slots}
    return sum(torch.Size(shape).numel() for shape in shapes.values()) * skeleton.dtype.itemsize
