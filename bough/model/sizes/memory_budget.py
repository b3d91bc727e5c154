"""Memory budgets, and the memory that a sweep takes in addition to weights and KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from transformers import PretrainedConfig

from bough.config.processes import TargetConfig
from bough.errors import ConfigError
from bough.model.architecture.architecture import max_positions
from bough.model.batch.path_spans import PART_KEYS, PARTIAL_BYTES, SPAN_ROWS, num_parts, tile_bytes
from bough.model.kv.session_kv import KVShape
from bough.model.kv.state_shape import RECURRENT
from bough.model.loading.loading import Skeleton
from bough.model.sizes.target_limits import KVRoom, TargetLimits
from bough.runtime.kv_budget import LEAST_CONTEXT, context_within, kv_budget
from bough.runtime.machine import default_budget, free_memory
from bough.sizing.placement import (
    MIN_SLABS,
    STAGED_LAYERS,
    Budgets,
    Fixed,
    OtherDevice,
    Placement,
    Tier,
    default_ring,
    gigabytes,
)
from bough.sizing.row_counts import MOST_SWEEP_TOKENS, OWN_MOST, SWEEP_TOKENS

Target = TypeVar("Target", bound=TargetConfig)

HIDDEN_COPIES = (
    8  # copies of a batch's hidden states at once: residuals, norms, queries, attention output, rotary tables
)
EXPERT_COPIES = 5  # of hidden numbers of the experts that rows choose, which are computed together
FURTHER_COPIES = 3  # of hidden states beyond SWEEP_TOKENS, which layers compute part by part: inputs, parts, results
ACTIVATION_SHARE = 1 / 32  # most of a GPU's memory that sweeps of more than SWEEP_TOKENS may take
GPU_SHARE = 0.95  # share of the memory that is free once libraries are loaded; the allocator rounds up
FLOAT32_BYTES, FLOAT64_BYTES = 4, 8


def free_device_bytes(device: torch.device) -> int:
    """Free memory of a device; on a CPU, free host memory."""
    return free_memory() if device.type == "cpu" else int(torch.cuda.mem_get_info(device)[0])


def whole_device_bytes(device: torch.device) -> int:
    """Total memory of a device."""
    return int(torch.cuda.mem_get_info(device)[1])


def host_budget(settings: TargetConfig, is_gpu: bool) -> int:
    """Bytes of host memory for layers: as configured, or most of what is free; 0 if layers run on the CPU.

    Raises:
        ConfigError: it is configured for a CPU.
    """
    if is_gpu:
        return settings.host_memory or default_budget(free_memory())
    if settings.host_memory:
        raise ConfigError(
            f"--host-memory: must be left out on the CPU, where --device-memory limits the memory, got "
            f"{gigabytes(settings.host_memory)}"
        )
    return 0


def device_budget(settings: TargetConfig, device: torch.device) -> int:
    """Bytes of device memory for the model including KV: as configured, or most of what is free.

    Raises:
        ConfigError: --device-reserve leaves nothing.
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
            f"--device-reserve: must be less than the memory of {device}, {gigabytes(whole_device_bytes(device))}, got "
            f"{gigabytes(settings.device_reserve)}"
        )
    return int(GPU_SHARE * min(free, whole))


def with_kv_memory(settings: Target, shape: KVShape, num_positions: int, device: int, host: int) -> Target:
    """The settings with defaults for KV memory, by the bytes available on `device` and `host`, and for --max-context.

    Raises:
        ConfigError: both --kv-memory and --kv-sessions are given, or --kv-memory is more than there is.
    """
    if settings.kv_memory and settings.kv_sessions:
        raise ConfigError(
            f"--kv-sessions: must be left out with --kv-memory ({gigabytes(settings.kv_memory)}), which sets the same "
            f"in bytes, got {settings.kv_sessions}"
        )
    most, number = min(settings.max_context or num_positions, num_positions), max(1, settings.kv_sessions)
    least = number * _session_bytes(settings, shape, most if settings.max_context else min(LEAST_CONTEXT, most))
    kv_memory, memory = settings.kv_memory, host if settings.kv_tier == "host" else device
    if kv_memory >= memory > 0:
        raise ConfigError(
            f"--kv-memory: must be less than the {gigabytes(memory)} for weights, KV and activations, got "
            f"{gigabytes(kv_memory)}"
        )
    if not kv_memory and settings.kv_sessions and settings.max_context:
        kv_memory = least
    elif not kv_memory:
        kv_memory = kv_budget(_session_bytes(settings, shape, most), memory, least)
    if not settings.max_context:
        state_bytes = 0 if settings.kv_sessions else shape.state_bytes
        room = kv_memory // number - (shape.state_bytes - state_bytes)
        most = context_within(room, shape.row_bytes, state_bytes, settings.max_nodes, most)
    if settings.kv_sessions:
        kv_memory = number * _session_bytes(settings, shape, most)
    return replace(settings, kv_memory=kv_memory, max_context=most)


def _session_bytes(settings: TargetConfig, shape: KVShape, num_tokens: int) -> int:
    """Bytes of a session of `num_tokens` and its largest tree."""
    return (num_tokens + settings.max_nodes) * shape.row_bytes + shape.state_bytes


def with_sweep_tokens(settings: Target, config: PretrainedConfig, shape: KVShape, device: int) -> Target:
    """The settings with a default for --max-sweep-tokens on a GPU, which has `device` bytes for the model."""
    tokens = settings.max_sweep_tokens or MOST_SWEEP_TOKENS
    chosen = replace(settings, max_sweep_tokens=tokens)
    while not settings.max_sweep_tokens and tokens > SWEEP_TOKENS:
        limits = TargetLimits.of(chosen, max_positions(config))
        if layer_activation_bytes(config, shape, limits) <= ACTIVATION_SHARE * device:
            break
        tokens //= 2
        chosen = replace(settings, max_sweep_tokens=tokens)
    return chosen


def require_way_through(placement: Placement, is_gpu: bool, host: int) -> None:
    """Check that layers can go from disk to a GPU through pinned memory, of which `host` bytes are for layers.

    Raises:
        ConfigError: it is too small.
    """
    if is_gpu and placement.layers(Tier.DISK) and not placement.num_host_slabs:
        least = placement.fixed.on_host + MIN_SLABS * placement.slab_bytes
        raise ConfigError(
            f"--host-memory: must be at least {gigabytes(least)}, as layers pass from disk to the GPU through pinned "
            f"memory for {MIN_SLABS} of them, got {gigabytes(host)}"
        )


def fixed_bytes(
    settings: TargetConfig,
    is_gpu: bool,
    config: PretrainedConfig,
    shape: KVShape,
    resident: int,
    scratch: int,
    embeddings: int = 0,
    room: KVRoom | None = None,
    has_head: bool = True,
) -> Fixed:
    """The memory that a target takes with any placement of layers, including `resident` and `scratch` bytes.

    `embeddings` of the resident bytes are on the host. `shape` is of the layers that the target holds; without `room`,
    `settings.kv_memory` is for these alone. A stage has no output head.

    Raises:
        ConfigError: KV memory holds no session, or is on a tier that does not exist.
    """
    if settings.kv_tier == "host" and not is_gpu:
        raise ConfigError("--kv-tier: must be device on the CPU, got host")
    limits = TargetLimits.of(settings, max_positions(config))
    kv, states = _kv_bytes(settings, config, shape, room)
    staged, on_host = (kv, 0) if settings.kv_tier == "device" else (STAGED_LAYERS * kv // max(1, shape.num_layers), kv)
    activations = (activation_bytes if has_head else layer_activation_bytes)(config, shape, limits)
    activations += attention_bytes(config, shape, limits, 0 if is_gpu else settings.threads)
    return Fixed(resident - embeddings, staged + states, activations, scratch, on_host, host_embeddings=embeddings)


def _kv_bytes(
    settings: TargetConfig, config: PretrainedConfig, shape: KVShape, room: KVRoom | None = None
) -> tuple[int, int]:
    """Bytes of all rows of keys and values, and of the states of the most sessions, which stay on devices."""
    limits = TargetLimits.of(settings, max_positions(config))
    room = room or limits.room(shape.row_bytes, settings.kv_memory, shape.state_bytes)
    return room.num_rows * shape.row_bytes, room.num_states * shape.state_bytes


def other_devices(
    settings: TargetConfig,
    config: PretrainedConfig,
    shape: KVShape,
    scratch: int,
    device: str,
    count: int,
    room: KVRoom | None = None,
) -> list[OtherDevice]:
    """The other devices that layers stay on; there are `count` GPUs, and sweeps run on `device`.

    `room` is as in `fixed_bytes`.

    Raises:
        ConfigError: one does not exist, or is `device`.
    """
    if not settings.resident_devices:
        return []
    given = ",".join(f"{name}={num_bytes}" for name, num_bytes in settings.resident_devices)
    limits = TargetLimits.of(settings, max_positions(config))
    layer_kv = max(layer_kv_bytes(settings, config, shape, room))
    fixed = stage_buffer_bytes(settings, True, config, shape, scratch, room)
    hop = _sweep_rows(limits) * hidden_bytes(config, shape.dtype)
    for name, _ in settings.resident_devices:
        if name == device or int(name.removeprefix("cuda:")) >= count:
            there = (
                ", ".join(f"cuda:{i}" for i in range(count) if f"cuda:{i}" != device) or "nothing: there is no other"
            )
            raise ConfigError(f"--resident-devices: must be of {there}, got {given}")
    return [OtherDevice(name, num_bytes, fixed, layer_kv, hop) for name, num_bytes in settings.resident_devices]


def layer_kv_bytes(
    settings: TargetConfig, config: PretrainedConfig, shape: KVShape, room: KVRoom | None = None
) -> tuple[int, ...]:
    """Bytes of all sessions' KV or states in each layer, in the memory of the device that computes it."""
    kv, states = _kv_bytes(settings, config, shape, room)
    layer_kv = 0 if settings.kv_tier == "host" else kv // max(1, shape.num_layers)
    if not shape.states:
        return (layer_kv,) * shape.num_layers
    layer_states = states // shape.states.num_layers
    return tuple(layer_states if kind == RECURRENT else layer_kv for kind in config.layer_types)


def stage_buffer_bytes(
    settings: TargetConfig,
    is_gpu: bool,
    config: PretrainedConfig,
    shape: KVShape,
    scratch: int,
    room: KVRoom | None = None,
) -> int:
    """The memory that a device with layers but no output head takes in addition: activations, scratch, staged KV."""
    limits = TargetLimits.of(settings, max_positions(config))
    kv, _ = _kv_bytes(settings, config, shape, room)
    staged = STAGED_LAYERS * kv // max(1, shape.num_layers) if settings.kv_tier == "host" else 0
    attention = attention_bytes(config, shape, limits, 0 if is_gpu else settings.threads)
    return layer_activation_bytes(config, shape, limits) + attention + scratch + staged


def budgets(settings: TargetConfig, layer_bytes: Sequence[int], device: int, host: int) -> Budgets:
    """The budgets of a target; `device` and `host` are in bytes."""
    return Budgets(
        device=device,
        host=host,
        ring=settings.ring_memory or default_ring(layer_bytes),
        max_resident=len(layer_bytes) if settings.resident_layers < 0 else settings.resident_layers,
    )


def activation_bytes(config: PretrainedConfig, shape: KVShape, limits: TargetLimits) -> int:
    """Upper estimate of a sweep's memory without weights and slots (tests/model/sizes/test_memory_budget.py)."""
    size, vocab_size = shape.dtype.itemsize, int(config.vocab_size)
    part = min(limits.rows or OWN_MOST, OWN_MOST)  # rows of a product, to which others are padded and copied
    num_rows = -(-limits.max_logit_rows // part) * part * (2 if _scales_logits(config) else 1) + part
    logits = 8 * vocab_size * FLOAT64_BYTES  # one row at a time
    return layer_activation_bytes(config, shape, limits) + num_rows * vocab_size * size + logits


def _scales_logits(config: PretrainedConfig) -> bool:
    """Whether a model changes its logits after the product, into a copy."""
    numbers = (value for name, value in config.to_dict().items() if "logit" in name or "lm_head" in name)
    return any(isinstance(value, int | float) and value not in (0, 1) for value in numbers)


def attention_bytes(config: PretrainedConfig, shape: KVShape, limits: TargetLimits, num_threads: int) -> int:
    """Memory of CPU threads for a tile of rows: scores, queries and results of a KV head's query heads.

    Latent attention has one KV head, and its tile all heads: 8 KB for each key with DeepSeek V3's 128. On a GPU, which
    has no threads, it is the memory for results of parts of the keys: at least those of a tile.
    """
    num_heads = int(config.num_attention_heads)
    if not num_threads:
        _, parts = num_parts(limits.slot_rows, PART_KEYS, window=0)
        of_tile = tile_bytes(num_heads, shape.value_dim or shape.head_dim, parts)
        return min(limits.max_sweep_tokens * of_tile, max(PARTIAL_BYTES, of_tile)) if parts > 1 else 0
    group = num_heads // shape.num_kv_heads
    width = limits.slot_rows + 2 * (shape.head_dim + shape.value_dim)
    return num_threads * SPAN_ROWS * group * width * FLOAT32_BYTES


def hidden_bytes(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of a row's hidden state."""
    return int(config.hidden_size) * dtype.itemsize


def _sweep_rows(limits: TargetLimits) -> int:
    """Rows of the largest sweep, including padding."""
    rows = max(limits.rows, OWN_MOST)
    return -(-limits.max_sweep_tokens // rows) * rows


def layer_activation_bytes(config: PretrainedConfig, shape: KVShape, limits: TargetLimits) -> int:
    """The part of `activation_bytes` on a device with layers but no output head."""
    size, rows, tokens = shape.dtype.itemsize, max(limits.rows, OWN_MOST), _sweep_rows(limits)
    num_chosen = int(getattr(config, "num_experts_per_tok", None) or 0)  # outputs of a row's experts before their sum
    # A mixture's rows wait for their experts together.
    further = 0 if num_chosen else max(0, tokens - max(rows, SWEEP_TOKENS))
    copies = (tokens - further) * (HIDDEN_COPIES + num_chosen) + further * FURTHER_COPIES
    hidden = copies * hidden_bytes(config, shape.dtype)
    width = int(getattr(config, "intermediate_size", 4 * config.hidden_size))
    of_experts = tokens * num_chosen * int(getattr(config, "moe_intermediate_size", None) or width) * EXPERT_COPIES
    intermediate = max(rows * width * 4, of_experts) * size
    attention = 0
    if shape.value_dim:  # latents: each head's queries and results are as wide, some of them copied
        attention = 4 * rows * int(config.num_attention_heads) * (shape.head_dim + shape.value_dim) * size
    recurrence = 0
    if shape.states:
        recurrence = tokens * shape.states.row_bytes + shape.states.step_bytes(max(limits.max_nodes, rows))
    return hidden + intermediate + attention + recurrence


def resident_bytes(skeleton: Skeleton) -> int:
    """Bytes of embeddings, final norm and output head, each tensor once."""
    shapes = {slot.source.places: slot.source.shape for slot in skeleton.resident_slots}
    return sum(torch.Size(shape).numel() for shape in shapes.values()) * skeleton.dtype.itemsize
