"""Sizes of a model, from the headers of its weights or from its configuration alone."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.constants import HF_HUB_CACHE
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from bough.config.processes import TargetConfig
from bough.errors import CheckpointError, InvalidModel
from bough.model.architecture.architecture import UNREADABLE, build_empty, describe, language_part, load_config
from bough.model.architecture.moe import EXPERT_ROWS, AnySource, ExpertSources, has_own_products, stack_of
from bough.model.backend import backend_of
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.checkpoint.model_places import is_hub_id
from bough.model.checkpoint.tensor_source import Joined, Transposed, room_bytes
from bough.model.kv.session_kv import KVShape
from bough.model.loading.loading import DTYPES, ParameterSlot, build_skeleton, can_wait, is_late
from bough.model.quant.format import SAMPLE_GROUP, Dequantized
from bough.model.quant.formats import format_of
from bough.model.quant.scaled import WORDS, StoredAs
from bough.model.running.batch_invariance import row_counts
from bough.model.running.host_embeddings import embeddings_for_host
from bough.model.sizes.memory_budget import fixed_bytes
from bough.sizing.cost_model import LAYER_SECONDS, ExpertWork, TiledWork, Work
from bough.sizing.placement import ExpertSizes, Fixed, SeparateExperts
from bough.sizing.row_counts import RowCounts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """Sizes and work of a model."""

    description: str
    config: PretrainedConfig
    kv: KVShape
    layer_bytes: tuple[int, ...]  # as stored on disk and sent over the link
    layer_flops: tuple[float, ...]  # of one token
    resident_bytes: int  # embeddings, final norm and output head, each tensor once
    host_bytes: int  # part of these in host memory
    scratch_bytes: int  # largest scratch memory of a layer
    packed: Dequantized | None  # the largest matrix that sweeps unpack; None if there are none
    matrices: tuple[tuple[int, int], ...]  # (outputs, inputs) of the products of the largest layer
    rows: RowCounts  # of a chunk
    work: Work
    apart: SeparateExperts | None  # for layers with experts

    def fixed(self, settings: TargetConfig, is_gpu: bool) -> Fixed:
        """Memory that a target takes for any placement of layers.

        Raises:
            ConfigError: KV memory holds no session, or is on a tier that does not exist.
        """
        return fixed_bytes(
            settings, is_gpu, self.config, self.kv, self.resident_bytes, self.scratch_bytes, self.host_bytes
        )


@dataclass(frozen=True, slots=True)
class _Parameter:
    shape: tuple[int, ...]
    stored_bytes: int
    scratch_bytes: int
    value_bytes: int
    packed: Dequantized | None  # the source of a matrix, or of one expert's, that is unpacked; None if it is not
    flops: float  # of one token
    num_experts: int  # of a stack that is read expert by expert; otherwise 0
    can_wait: bool  # see `bough.model.loading.loading`

    @property
    def unpacked_bytes(self) -> int:
        return self.value_bytes if self.packed is not None else 0


class FoundModel(NamedTuple):
    """A model that may be planned."""

    config: PretrainedConfig
    path: Path  # of its weights, or where they would be
    checkpoint: Checkpoint | None  # None if there is only a configuration


def find_model(model: str) -> FoundModel:
    """A model folder, a GGUF file or a hub id.

    For a hub id outside the local cache, config.json and the headers of its weights are fetched.

    Raises:
        CheckpointError: there is no configuration, or weights are damaged.
    """
    path = Path(model).expanduser()
    if is_hub_id(model):
        return _on_the_hub(model)
    if not path.exists():
        raise InvalidModel("model", "must be a folder that exists, a GGUF file, or a hub id", model)
    if path.is_dir() and (path / "config.json").is_file() and not any(path.glob("*.safetensors")):
        return FoundModel(load_config(path), path, None)
    checkpoint = Checkpoint.open(path)
    return FoundModel(load_config(checkpoint.path), checkpoint.path, checkpoint)


def _on_the_hub(model: str) -> FoundModel:
    with suppress(CheckpointError):
        checkpoint = Checkpoint.open(model)
        return FoundModel(load_config(checkpoint.path), checkpoint.path, checkpoint)
    try:
        config = language_part(AutoConfig.from_pretrained(model, trust_remote_code=False))
    except OSError as exc:
        raise InvalidModel(
            "model",
            f"config.json of {model} cannot be fetched, and is not in the local Hugging Face cache: "
            f"{(str(exc) or repr(exc)).splitlines()[0]}",
        ) from exc
    except UNREADABLE as exc:
        raise InvalidModel("model", f"config.json of {model}: {exc}") from exc
    cached = try_to_load_from_cache(model, "config.json")
    folder = Path(cached).parent if isinstance(cached, str) else Path(HF_HUB_CACHE)
    try:
        return FoundModel(config, folder, Checkpoint.headers_of_hub(model, folder))
    except CheckpointError as exc:
        logger.warning("%s; planned from its configuration alone", exc)
        return FoundModel(config, folder, None)


def model_shapes(found: FoundModel, dtype_name: str, bits: int, rows: int, device_type: str = "cpu") -> ModelShapes:
    """Sizes for computing in a dtype, in chunks of `rows` rows, from the headers of the weights.

    `bits` is the assumed storage of weights: 16, or 8 or 4 with zero points as in AWQ and GPTQ; 0 is as stored.

    Raises:
        CheckpointError: the architecture or the format is not supported, or headers are needed and missing.
    """
    config, path, checkpoint = found
    dtype, by_matrix = DTYPES[dtype_name], device_type != "cpu"
    num_experts, num_chosen = expert_counts(config)
    share = num_chosen / num_experts
    if checkpoint is not None and not bits:
        skeleton = build_skeleton(checkpoint, dtype)
        model, layers, format_ = skeleton.model, list(skeleton.layers), skeleton.quantization
        parameters = [[_stored(slot, dtype, share, by_matrix) for slot in slots] for slots in skeleton.layer_slots]
        description = skeleton.describe()
    else:
        format_ = None
        if not bits and format_of(config, path) is not None:
            raise InvalidModel(
                "model",
                "must have its weights' headers next to config.json, as they are packed",
                f"{path} without *.safetensors; give --bits 4 to plan without them",
            )
        stored = dtype if bits else _stored_dtype(config, dtype)  # before the configuration gets `dtype`
        model = build_empty(config, dtype)
        layers = list(model.get_decoder().layers)
        parameters = [list(_imagined(layer, bits, stored, dtype, share, by_matrix)) for layer in layers]
        description = describe(model, dtype) + (f", {bits} bits" if 0 < bits < 16 else "")
    if by_matrix:
        parameters = [[_as_multiplied(p) for p in layer] for layer in parameters]
    sizes = tuple(sum(p.stored_bytes for p in layer) for layer in parameters)
    largest = parameters[sizes.index(max(sizes))]
    return ModelShapes(
        description=description,
        config=config,
        kv=KVShape.of(config, dtype),
        layer_bytes=sizes,
        layer_flops=tuple(sum(p.flops for p in layer) for layer in parameters),
        resident_bytes=_outside_bytes(model, layers),
        host_bytes=_host_bytes(model, device_type),
        scratch_bytes=max(_scratch_bytes(layer, by_matrix) for layer in parameters),
        packed=max((p for layer in parameters for p in layer), key=lambda p: p.unpacked_bytes).packed,
        matrices=tuple((p.shape[-2], p.shape[-1]) for p in largest if len(p.shape) >= 2),
        rows=row_counts(model, format_, dtype, rows, backend_of(torch.device(device_type))),
        work=_work(config, parameters, _head_bytes(model), dtype, by_matrix),
        apart=_apart(parameters, by_matrix),
    )


def _stored(slot: ParameterSlot, dtype: torch.dtype, expert_share: float, by_matrix: bool) -> _Parameter:
    """A parameter as stored in the checkpoint."""
    stack, shape = stack_of(slot.module, slot.source), slot.source.shape
    packed = max(_packed_parts(slot.source), key=lambda part: math.prod(part.shape), default=None)
    return _Parameter(
        shape,
        sum(place.num_bytes for place in slot.source.places),
        stack.scratch_bytes(dtype) if stack else slot.scratch_bytes(dtype, by_matrix),
        math.prod(shape) * dtype.itemsize,
        packed,
        _flops(shape, expert_share),
        shape[0] if stack is not None else 0,
        can_wait(slot),
    )


def _as_multiplied(parameter: _Parameter) -> _Parameter:
    """A parameter on a GPU, which multiplies with packed matrices as they are."""
    if parameter.packed is None or not (parameter.can_wait or parameter.num_experts):
        return parameter
    return replace(parameter, value_bytes=parameter.stored_bytes, packed=None)


def _packed_parts(source: AnySource) -> Iterator[Dequantized]:
    """The packed matrices of a source."""
    if isinstance(source, Joined | ExpertSources):
        for part in source.parts:
            yield from _packed_parts(part)
    elif isinstance(source, Transposed):
        yield from _packed_parts(source.matrix)
    elif isinstance(source, Dequantized) and source.is_packed:
        yield source


def _imagined(
    layer: nn.Module, bits: int, stored: torch.dtype, dtype: torch.dtype, expert_share: float, by_matrix: bool
) -> Iterator[_Parameter]:
    """The parameters of a layer as they would be stored in `bits`, or in 0 as `stored`."""
    stored_as = StoredAs(WORDS, bits, "group", (1, SAMPLE_GROUP), is_symmetric=False)
    for module in layer.modules():
        buffers = ((k, b) for k, b in module._buffers.items() if k not in module._non_persistent_buffers_set)
        for key, parameter in (*module._parameters.items(), *buffers):
            if parameter is None:
                continue
            shape, is_stack = tuple(parameter.shape), parameter.dim() == 3 and has_own_products(module)
            is_packed = 0 < bits < 16 and (is_stack or (isinstance(module, nn.Linear) and len(shape) == 2))
            packed = stored_as.sample(*shape[-2:]) if is_packed else None
            # Experts are converted one at a time, in parts that are then joined.
            plain = 2 * room_bytes(shape[1:], dtype) if is_stack else room_bytes(shape, dtype)
            num_matrices = shape[0] if is_stack else 1
            scratch = plain * (stored != dtype)
            if packed is not None:
                scratch = packed.scratch_bytes(dtype) if is_stack or not by_matrix else 0
            packed_bytes = num_matrices * sum(place.num_bytes for place in packed.places) if packed else 0
            yield _Parameter(
                shape,
                packed_bytes or parameter.numel() * stored.itemsize,
                scratch,
                parameter.numel() * dtype.itemsize,
                packed,
                _flops(shape, expert_share),
                shape[0] if is_stack else 0,
                is_late(module, key),
            )


def _flops(shape: Sequence[int], expert_share: float) -> float:
    """Operations of one token, which chooses a share of a stack's experts."""
    return 2.0 * math.prod(shape) * (expert_share if len(shape) == 3 else 1) if len(shape) >= 2 else 0.0


def _work(
    config: PretrainedConfig,
    layers: Sequence[Sequence[_Parameter]],
    head_bytes: int,
    dtype: torch.dtype,
    by_matrix: bool,
) -> Work:
    stacks = [p for layer in layers for p in layer if p.num_experts]
    rest = [p for layer in layers for p in layer if not p.num_experts]
    experts = ExpertWork(
        sum(p.flops for p in stacks),
        sum(p.value_bytes for p in stacks),
        sum(p.unpacked_bytes for p in stacks),
        *expert_counts(config),
        EXPERT_ROWS,
    )
    return (TiledWork if by_matrix else Work)(
        sum(p.flops for p in rest) + 2 * head_bytes / dtype.itemsize,
        sum(p.value_bytes for p in rest) + head_bytes,
        sum(p.unpacked_bytes for p in rest),
        experts if stacks else None,
        LAYER_SECONDS * len(layers) if by_matrix else 0.0,
    )


def _scratch_bytes(layer: Sequence[_Parameter], by_matrix: bool) -> int:
    """Scratch bytes of a layer: all its dequantized values, or with `by_matrix` only the largest one."""
    late = [p.scratch_bytes for p in layer if by_matrix and p.can_wait]
    return max(late, default=0) + sum(p.scratch_bytes for p in layer if not (by_matrix and p.can_wait))


def _apart(layers: Sequence[Sequence[_Parameter]], by_matrix: bool) -> SeparateExperts | None:
    """Sizes of layers without experts, and of their experts."""
    stacks = [stack for layer in layers if (stack := [p for p in layer if p.num_experts])]
    if not stacks:
        return None
    counts = [stack[0].num_experts for stack in stacks]
    sizes = [sum(p.stored_bytes for p in stack) for stack in stacks]
    largest = max(size // count for size, count in zip(sizes, counts, strict=True))
    rest = [[p for p in layer if not p.num_experts] for layer in layers]
    scratch = max(_scratch_bytes(layer, by_matrix) for layer in rest)
    scratch += max(p.scratch_bytes for stack in stacks for p in stack)
    sizes_of_rest = [sum(p.stored_bytes for p in layer) for layer in rest]
    return SeparateExperts(sizes_of_rest, ExpertSizes(largest, max(counts), sum(counts), sum(sizes)), scratch)


def _stored_dtype(config: PretrainedConfig, default: torch.dtype) -> torch.dtype:
    """The dtype in which a checkpoint stores unpacked weights."""
    named = getattr(config, "dtype", None)
    return named if isinstance(named, torch.dtype) else DTYPES.get(str(named), default)


def expert_counts(config: PretrainedConfig) -> tuple[int, int]:
    """Number of experts of a layer, and of those that a row chooses."""
    num_experts = next(
        (
            int(n)
            for key in ("num_local_experts", "num_experts", "n_routed_experts")
            if (n := getattr(config, key, None))
        ),
        1,
    )
    return num_experts, int(getattr(config, "num_experts_per_tok", None) or num_experts)


def _outside_bytes(model: PreTrainedModel, layers: list[nn.Module]) -> int:
    """Bytes of everything outside layers."""
    inside = {id(parameter) for layer in layers for parameter in layer.state_dict(keep_vars=True).values()}
    outside = {id(p): p for p in model.state_dict(keep_vars=True).values() if id(p) not in inside}
    return sum(parameter.numel() * parameter.element_size() for parameter in outside.values())


def _host_bytes(model: PreTrainedModel, device_type: str) -> int:
    host = embeddings_for_host(model, device_type)
    return sum(p.numel() * p.element_size() for p in host.parameters()) if host is not None else 0


def _head_bytes(model: PreTrainedModel) -> int:
    head = model.get_output_embeddings()
    return head.weight.numel() * head.weight.element_size() if head is not None else 0
