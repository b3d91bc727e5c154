"""Upper bound of a draft's memory from its headers and configuration; without torch, for `bough up`."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from bough.config.cache_paths import EXPANSION_NAME
from bough.config.processes import DraftConfig
from bough.errors import CheckpointError
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.checkpoint.container import TensorPlace
from bough.model.checkpoint.gguf_file import BLOCKS
from bough.model.checkpoint.model_places import container_of
from bough.model.kv.state_shape import GROWN_ROWS, RECURRENT, StateShape
from bough.processes.memory_division import DraftNeeds
from bough.runtime.kv_budget import LEAST_CONTEXT
from bough.trees.tree_plan import MAX_EXPANSIONS

FLOATS = ("BF16", "F16", "F32")
LAYER = re.compile(r"\b(?:layers|blk)\.(\d+)\.")
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
ATTENTION_INTERVAL = 4  # every fourth layer has attention in Qwen3-Next and Qwen3.5, unless they say otherwise
AUTO_BYTES = 2  # if the draft's dtype is not configured
PACKED_BITS = 4  # of a packed checkpoint whose bits are not stated


def draft_needs(config: DraftConfig) -> DraftNeeds:
    """Bytes of weights of all layers but identity copies, in the compute dtype; and KV of a long session.

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
    unpacked, largest = (1.0, unpacked) if config.bits == "4" else (unpacked, 0.0)  # only the largest is written out
    kept = _kept_layers(checkpoint, int(text.get("num_hidden_layers", 1)))
    weights = sum(
        _bytes_in_memory(place, size, unpacked)
        for name, place in checkpoint.tensors.items()
        if (found := LAYER.search(name)) is None or int(found[1]) in kept
    )
    packed = [place for place in checkpoint.tensors.values() if place.dtype not in FLOATS]
    each = (place.num_bytes // max(1, math.prod(place.shape[:-2])) for place in packed)  # of a stack of experts: one
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
    return DraftNeeds(int(weights), session, step, None if config.max_context else least, row_bytes)


def _states(text: dict[str, Any], kept: set[int], size: int, where: str) -> StateShape | None:
    """Sizes of the recurrent layers that are kept, with numbers of `size` bytes. Raises CheckpointError."""
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
    found = [bits for bits in values if type(bits) is int and bits > 0]  # others are refused when the draft is loaded
    return min(found, default=8 if quantization.get("quant_method") == "fp8" else PACKED_BITS)


def _object(value: object, where: str) -> dict[str, Any]:
    """The fields of a JSON object; none of null. Raises CheckpointError."""
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"{where}: must be an object, got {value!r}")
    return value or {}


def _kept_layers(checkpoint: Checkpoint, num_layers: int) -> set[int]:
    """Layers that change their input, without transformers: all but identity copies of a block expansion."""
    manifest: Path = checkpoint.path / EXPANSION_NAME
    return set(json.loads(manifest.read_text())["working_layers"] if manifest.is_file() else range(num_layers))


def _bytes_in_memory(place: TensorPlace, size: int, unpacked: float) -> float:
    """Bytes of a tensor with `size` bytes per number if plain, or `unpacked` times its stored bytes if packed.

    A GGUF file tells how many numbers there are, and has some outside of layers, which do not stay packed.
    """
    is_plain = place.dtype in FLOATS
    if place.dtype in BLOCKS:
        is_plain = unpacked > 1 or LAYER.search(place.name) is None
    return math.prod(place.shape) * size if is_plain else place.num_bytes * unpacked
