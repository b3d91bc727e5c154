"""Division of one machine's memory among the processes of `bough up`: CPU workers, or two workers on one GPU.

A draft's needs are an upper bound from its headers and configuration, without torch. The memory that processes need in
addition to weights and KV is from docs/decisions/040-processes-of-bough-up.md, plus a margin.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from bough.config.cache_paths import EXPANSION_NAME
from bough.config.processes import DraftConfig, TargetConfig
from bough.errors import CheckpointError, ConfigError
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.checkpoint.container import TensorPlace
from bough.model.checkpoint.gguf_file import BLOCKS
from bough.model.checkpoint.model_places import container_of
from bough.model.kv.state_shape import GROWN_ROWS, RECURRENT, StateShape
from bough.runtime.kv_budget import LEAST_CONTEXT, MOST_BYTES, kv_budget
from bough.runtime.machine import may_be_gpu
from bough.sizing.placement import gigabytes
from bough.trees.tree_plan import MAX_EXPANSIONS

INDEX_BYTES = 50 * 1000**2
ORCHESTRATOR_BYTES = 150 * 1000**2
WORKER_BYTES = 320 * 1000**2  # Python, torch, kernels and buffers
SPARE_BYTES, SPARE_SHARE = 200 * 1000**2, 0.1  # left free, the larger of the two, for page cache and other programs
LEAST_TARGET_BYTES = 100 * 1000**2  # smallest budget accepted here, below that of any model
CONTEXT_BYTES = 1000**3  # of a process on a GPU: CUDA's context, libraries, graphs and activations
KV_SESSIONS = 8  # a draft's KV memory by default, in sessions of the longest context
FLOATS = ("BF16", "F16", "F32")
LAYER = re.compile(r"\b(?:layers|blk)\.(\d+)\.")
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
ATTENTION_INTERVAL = 4  # every fourth layer has attention in Qwen3-Next and Qwen3.5, unless they say otherwise
AUTO_BYTES = 2  # assumed if the draft's dtype is not configured
PACKED_BITS = 4  # of a packed checkpoint whose bits are not stated


class DraftNeeds(NamedTuple):
    """Bytes that a draft takes in addition to its process."""

    weights: int
    session: int  # KV of a session of the longest context
    step: int = 0  # activations of a step of recurrent layers
    least: int | None = None  # required KV; None stands for that of a session of the longest context
    row: int = 0  # KV of a token; 0 if unknown


@dataclass(frozen=True, slots=True)
class Share:
    """The memory and threads of one process."""

    name: str
    num_bytes: int
    num_threads: int
    remark: str = ""

    def __str__(self) -> str:
        threads = f"{self.num_threads} thread{'s' if self.num_threads > 1 else ''}"
        return f"{self.name:15}{gigabytes(self.num_bytes):>9}, {threads}{', ' if self.remark else ''}{self.remark}"


@dataclass(frozen=True, slots=True)
class Division:
    """A share for each process, and the workers' settings with these limits."""

    free: int
    shares: tuple[Share, ...]
    target: TargetConfig
    draft: DraftConfig | None

    def lines(self) -> Sequence[str]:
        """Lines for display, one for each process."""
        spare = self.free - sum(share.num_bytes for share in self.shares)
        last = f"  {'left free':15}{gigabytes(spare):>9}"
        if spare < 0:
            last = (
                f"  more than is free by {gigabytes(-spare)}: this machine may swap, or kill a process for its memory"
            )
        return [
            f"memory: {gigabytes(self.free)} are free for these processes; at most",
            *(f"  {share}" for share in self.shares),
            last,
        ]


def divide(
    free: int, target: TargetConfig, draft: DraftConfig | None, needs: DraftNeeds | None, has_index: bool
) -> Division:
    """Divide `free` bytes: the others get what they need, the target most of the rest. Explicit settings stay.

    `has_index` says whether an index runs here too. Workers compute in turns, so each gets all threads.

    Raises:
        ConfigError: too little is left for the target.
    """
    shares = [Share("index", INDEX_BYTES, 1)] if has_index else []
    shares.append(Share("orchestrator", ORCHESTRATOR_BYTES, 1))
    if draft is not None and needs is not None:
        kv = draft.kv_memory or kv_budget(needs.session, free // 2, needs.least)
        remark = f"of which {gigabytes(kv)} for KV and {gigabytes(needs.weights)} for weights"
        shares.append(Share("draft worker", WORKER_BYTES + needs.weights + needs.step + kv, draft.threads, remark))
        draft = replace(draft, kv_memory=kv)
    num_stages = target.stages
    others = sum(share.num_bytes for share in shares) + num_stages * WORKER_BYTES
    spare = max(SPARE_BYTES, int(free * SPARE_SHARE))
    budget = target.device_memory or (free - spare - others) // num_stages
    if budget < LEAST_TARGET_BYTES:
        raise ConfigError(
            f"--device-memory: must be at least {gigabytes(LEAST_TARGET_BYTES)}, got {gigabytes(max(0, budget))}: of "
            f"{gigabytes(free)} free, other processes take {gigabytes(others)} and {gigabytes(spare)} stay free; use a "
            "smaller --kv-memory, or --draft none"
        )
    require_kv(target, budget)
    remark = f"of which {gigabytes(budget)} for weights, KV and activations"
    shares.append(Share("target worker", WORKER_BYTES + budget, target.threads, remark))
    shares += [replace(shares[-1], name=f"stage {number}") for number in range(1, num_stages)]
    return Division(free, tuple(shares), replace(target, device_memory=budget), draft)


def require_kv(target: TargetConfig, memory: int) -> None:
    """Raise ConfigError unless the target's --kv-memory is less than its whole memory of `memory` bytes."""
    if target.kv_memory >= memory:
        raise ConfigError(
            f"--kv-memory: must be less than the {gigabytes(memory)} for weights, KV and activations, got "
            f"{gigabytes(target.kv_memory)}"
        )


def require_session(target: TargetConfig, needs: DraftNeeds) -> None:
    """Raise ConfigError if --kv-memory is too small for any session; `needs` are those of the target's model.

    Once it knows the model's own limit, the worker also refuses less than a session of --max-context.
    """
    least = (1 + target.max_nodes) * needs.row
    if 0 < target.kv_memory < least:
        raise ConfigError(
            f"--kv-memory: must be at least {least} bytes, for one token and a tree of {target.max_nodes} nodes, got "
            f"{target.kv_memory}"
        )


class SharedGpu(NamedTuple):
    """Settings with which both fit into one GPU's memory, and an explanation for people."""

    target: TargetConfig
    draft: DraftConfig
    words: str


def on_one_gpu(target: TargetConfig, draft: DraftConfig) -> bool:
    """Whether both may use the same GPU; without a setting that is the first one."""
    devices = [config.device for config in (target, draft)]
    return all(map(may_be_gpu, devices)) and _number(devices[0]) == _number(devices[1])


def divide_gpu(target: TargetConfig, draft: DraftConfig, needs: DraftNeeds) -> SharedGpu:
    """Settings with the draft's KV memory filled in. The target gets the rest. Explicit values stay."""
    least = needs.session if needs.least is None else needs.least
    kv = draft.kv_memory or max(least, min(MOST_BYTES, KV_SESSIONS * needs.session))
    share = CONTEXT_BYTES + needs.weights + needs.step + kv
    words = (
        f"GPU memory: at most {gigabytes(share)} for the draft worker, of which {gigabytes(kv)} for KV and "
        f"{gigabytes(needs.weights)} for weights; "
    )
    draft = replace(draft, kv_memory=kv)
    if target.device_memory:
        return SharedGpu(target, draft, f"{words}{gigabytes(target.device_memory)} for the target, as set")
    reserve = target.device_reserve or share
    return SharedGpu(replace(target, device_reserve=reserve), draft, f"{words}most of the rest for the target")


def _number(device: str) -> int:
    found = re.search(r"\d+$", device)
    return int(found[0]) if found else 0


def draft_needs(config: DraftConfig) -> DraftNeeds:
    """Bytes of all layers except identity copies, in the compute dtype, and the KV of a long session.

    Raises:
        CheckpointError: the model does not exist, or is damaged.
    """
    checkpoint = Checkpoint.open(config.model)
    container = container_of(checkpoint.path)
    where, whole = str(container.config_place), container.config()
    text = _object(whole.get("text_config"), f"{where}.text_config") or whole
    size = DTYPE_BYTES.get(config.dtype, AUTO_BYTES)
    quantization = whole.get("quantization_config") or text.get("quantization_config")
    unpacked = 8 * size / _least_bits(quantization, f"{where}.quantization_config")
    # Of a packed draft, only the largest matrix is dequantized at a time.
    unpacked, largest = (1.0, unpacked) if config.bits == "4" else (unpacked, 0.0)
    kept = _kept_layers(checkpoint, int(text.get("num_hidden_layers", 1)))
    weights = sum(
        _bytes_in_memory(place, size, unpacked)
        for name, place in checkpoint.tensors.items()
        if (found := LAYER.search(name)) is None or int(found[1]) in kept
    )
    packed = [place for place in checkpoint.tensors.values() if place.dtype not in FLOATS]
    # Of a stack of experts, one expert at a time.
    each = (place.num_bytes // max(1, math.prod(place.shape[:-2])) for place in packed)
    weights += largest * max(each, default=0)
    heads = int(text.get("num_attention_heads") or 1)
    head_dim = int(text.get("head_dim") or int(text.get("hidden_size") or 0) // heads)
    width = 2 * int(text.get("num_key_value_heads") or heads) * head_dim
    if rank := text.get("kv_lora_rank"):
        width = int(rank) + int(text.get("qk_rope_head_dim") or 0)
    states = _states(text, kept, size, where)
    row_bytes = (len(kept) - (states.num_layers if states else 0)) * width * size
    positions = int(text.get("max_position_embeddings") or config.max_context or LEAST_CONTEXT)
    longest = min(config.max_context or positions, positions)
    own = states.session_bytes(GROWN_ROWS) if states else 0
    session, least = (
        (num_tokens + (GROWN_ROWS if states else MAX_EXPANSIONS)) * row_bytes + own
        for num_tokens in (longest, min(LEAST_CONTEXT, longest))
    )
    step = states.step_bytes(GROWN_ROWS) if states else 0
    is_known = "num_attention_heads" in text  # otherwise the model's class has a default, and this is an estimate
    least_context = None if config.max_context else least
    return DraftNeeds(int(weights), session, step, least_context, row_bytes if is_known else 0)


def _states(text: dict[str, Any], kept: set[int], size: int, where: str) -> StateShape | None:
    """Sizes of the recurrent layers that the draft uses, with numbers of `size` bytes. Raises CheckpointError."""
    if "linear_conv_kernel_dim" not in text:
        return None
    types = text.get("layer_types")
    if types is None:
        interval = text.get("full_attention_interval", ATTENTION_INTERVAL)
        if type(interval) is not int or interval < 1:
            raise CheckpointError(f"{where}: full_attention_interval must be 1 or more, got {interval!r}")
        types = [RECURRENT if (layer + 1) % interval else "" for layer in range(max(kept, default=0) + 1)]
    if not isinstance(types, list):
        raise CheckpointError(f"{where}: layer_types must be a list, got {types!r}")
    try:
        config = {**text, "layer_types": [kind for layer, kind in enumerate(types) if layer in kept]}
        return StateShape.of(SimpleNamespace(**config), cast(Any, SimpleNamespace(itemsize=size)))
    except (AttributeError, TypeError, ValueError) as exc:
        raise CheckpointError(f"{where}: must give the sizes of its recurrent layers, got {exc}") from exc


def _least_bits(quantization: object, where: str) -> int:
    """The fewest bits in which a configuration says that weights are packed. Raises CheckpointError."""
    quantization = _object(quantization, where)
    groups = [
        _object(_object(group, f"{where}.config_groups.{name}").get("weights"), f"{where}.config_groups.{name}.weights")
        for name, group in _object(quantization.get("config_groups"), f"{where}.config_groups").items()
    ]
    values = (fields.get(key) for fields in (quantization, *groups) for key in ("bits", "w_bit", "num_bits"))
    found = [bits for bits in values if type(bits) is int and bits > 0]  # loading the draft refuses any other value
    return min(found, default=8 if quantization.get("quant_method") == "fp8" else PACKED_BITS)


def _object(value: object, where: str) -> dict[str, Any]:
    """The fields of a JSON object; none of null. Raises CheckpointError."""
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"{where}: must be an object, got {value!r}")
    return value or {}


def _kept_layers(checkpoint: Checkpoint, num_layers: int) -> set[int]:
    """Layers other than identity copies of a block expansion, found without transformers."""
    manifest: Path = checkpoint.path / EXPANSION_NAME
    return set(json.loads(manifest.read_text())["working_layers"] if manifest.is_file() else range(num_layers))


def _bytes_in_memory(place: TensorPlace, size: int, unpacked: float) -> float:
    """Bytes of a tensor with `size` bytes per number if plain, or `unpacked` times its stored bytes if packed.

    A GGUF file stores the number of elements. Its tensors outside layers do not stay packed.
    """
    is_plain = place.dtype in FLOATS
    if place.dtype in BLOCKS:
        is_plain = unpacked > 1 or LAYER.search(place.name) is None
    return math.prod(place.shape) * size if is_plain else place.num_bytes * unpacked
