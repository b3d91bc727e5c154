"""Sizes of a model from its configuration alone, without weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.constants import HF_HUB_CACHE
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from bough.config.processes import TargetConfig
from bough.errors import CheckpointError
from bough.model.architecture.architecture import UNREADABLE, build_empty, describe, language_part, load_config
from bough.model.architecture.moe import EXPERT_ROWS, has_own_products
from bough.model.checkpoint.checkpoint import resolve
from bough.model.checkpoint.gguf_file import is_gguf
from bough.model.checkpoint.hub import is_hub_id
from bough.model.checkpoint.tensor_source import room_bytes
from bough.model.kv.session_kv import KVShape
from bough.model.loading.late_writes import is_late
from bough.model.loading.loading import DTYPES
from bough.model.quant.formats import format_of
from bough.model.running.batch_invariance import row_counts
from bough.model.running.host_embeddings import embeddings_for_host
from bough.model.sizes.memory_budget import fixed_bytes
from bough.model.sizes.samples import PackedFormat
from bough.model.sizes.stored_format import Packing
from bough.sizing.flops import ExpertWork, Work
from bough.sizing.placement import ExpertSizes, Fixed, SeparateExperts
from bough.sizing.row_counts import RowCounts


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """Sizes and work of a model."""

    description: str
    config: PretrainedConfig
    kv: KVShape
    layer_bytes: tuple[int, ...]  # as stored on disk and sent over the link
    layer_flops: tuple[float, ...]  # of one token
    resident_bytes: int  # embeddings, final norm and output head, each tensor once
    host_bytes: int  # of these, kept in host memory
    scratch_bytes: int  # largest scratch memory of a layer
    packing: PackedFormat | None  # of the largest packed matrix; None if none is packed
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
    shape: torch.Size
    stored_bytes: int
    scratch_bytes: int
    value_bytes: int
    packing: PackedFormat | None  # None if unpacked
    unpacked_bytes: int
    flops: float  # of one token
    num_experts: int  # of a stack that is read expert by expert; otherwise 0
    can_wait: bool  # see `bough.model.loading.late_writes`


def find_config(model: str) -> tuple[PretrainedConfig, Path]:
    """The configuration of a model folder, a GGUF file or a hub id, and the folder or file for its weights.

    Only config.json is fetched of a hub id; if that fails, the local cache is used.

    Raises:
        CheckpointError: there is no configuration.
    """
    folder = Path(model).expanduser()
    if is_gguf(model):
        file = resolve(model)
        return load_config(file), file
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"model: must be a Hugging Face model folder, got {folder}, which has no config.json")
        return load_config(folder), folder
    if not is_hub_id(model):
        raise CheckpointError(f"model: must be a folder that exists, a GGUF file, or a hub id, got {model}")
    try:
        config = language_part(AutoConfig.from_pretrained(model, trust_remote_code=False))
    except OSError as exc:
        raise CheckpointError(
            f"model: config.json of {model} can neither be fetched nor is it in the local Hugging Face cache: "
            f"{(str(exc) or repr(exc)).splitlines()[0]}"
        ) from exc
    except UNREADABLE as exc:
        raise CheckpointError(f"model: config.json of {model}: {exc}") from exc
    cached = try_to_load_from_cache(model, "config.json")
    return config, Path(cached).parent if isinstance(cached, str) else Path(HF_HUB_CACHE)


def model_shapes(
    config: PretrainedConfig, folder: Path, dtype_name: str, bits: int, rows: int, device_type: str = "cpu"
) -> ModelShapes:
    """Sizes for computing in a dtype, in chunks of `rows` rows, from the architecture on the meta device.

    `bits` is how weights will be stored: 16, or 8 or 4 as compressed-tensors has them; 0 is as the configuration says.

    Raises:
        CheckpointError: the architecture or the packing is not supported.
    """
    dtype = DTYPES[dtype_name]
    packing = Packing.of(config, folder, bits)
    stored = dtype if bits == 16 else _stored_dtype(config, dtype)
    model, by_matrix = build_empty(config, dtype), device_type != "cpu"
    layers = list(model.get_decoder().layers)
    prefix = next(name for name, module in model.named_modules() if module is model.get_decoder().layers)
    share = chosen_share(config)
    parameters = [
        list(_parameters(f"{prefix}.{index}", layer, packing, stored, dtype, share))
        for index, layer in enumerate(layers)
    ]
    sizes = tuple(sum(p.stored_bytes for p in layer) for layer in parameters)
    largest = parameters[sizes.index(max(sizes))]
    return ModelShapes(
        description=describe(model, dtype) + (f", {packing.description}" if packing else ""),
        config=config,
        kv=KVShape.of(config, dtype),
        layer_bytes=sizes,
        layer_flops=tuple(sum(p.flops for p in layer) for layer in parameters),
        resident_bytes=_outside_bytes(model, layers),
        host_bytes=_host_bytes(model, device_type),
        scratch_bytes=max(_scratch_bytes(layer, by_matrix) for layer in parameters),
        packing=max((p for layer in parameters for p in layer), key=lambda p: p.unpacked_bytes).packing,
        matrices=tuple((p.shape[-2], p.shape[-1]) for p in largest if len(p.shape) >= 2),
        rows=row_counts(model, None if bits else format_of(config, folder), dtype, rows, device_type),
        work=_work(config, parameters, _head_bytes(model), dtype, by_matrix),
        apart=_apart(parameters, by_matrix),
    )


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
        *_num_experts(config),
        EXPERT_ROWS,
    )
    return Work(
        sum(p.flops for p in rest) + 2 * head_bytes / dtype.itemsize,
        sum(p.value_bytes for p in rest) + head_bytes,
        sum(p.unpacked_bytes for p in rest),
        experts if stacks else None,
        by_matrix,
    )


def _scratch_bytes(layer: Sequence[_Parameter], by_matrix: bool) -> int:
    """Scratch bytes of a layer: all its dequantized values, or with `by_matrix` only the largest matrix of those."""
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


def _parameters(
    name: str,
    layer: nn.Module,
    packing: Packing | None,
    stored: torch.dtype,
    dtype: torch.dtype,
    expert_share: float,
) -> Iterator[_Parameter]:
    """The parameters of a layer named `name`."""
    for module_name, module in layer.named_modules(prefix=name):
        buffers = ((k, b) for k, b in module._buffers.items() if k not in module._non_persistent_buffers_set)
        for key, parameter in (*module._parameters.items(), *buffers):
            if parameter is None:
                continue
            shape, is_stack = parameter.shape, parameter.dim() == 3
            packed = packing.of_parameter(f"{module_name}.{key}", module, parameter, stored) if packing else None
            value = parameter.numel() * dtype.itemsize
            is_view = packed is None and stored == dtype
            # Experts are dequantized one at a time, first in parts if they are no views, which are then concatenated.
            matrix = shape[1:] if is_stack else shape
            room = room_bytes(matrix, dtype) * (1 if is_view or not is_stack else 2)
            room += packed[0].joined_bytes(matrix) if packed and packed[0] else 0
            yield _Parameter(
                shape,
                packed[1] if packed else parameter.numel() * stored.itemsize,
                room if is_stack or not is_view else 0,
                value,
                packed[0] if packed else None,
                value if packed and packed[0] else 0,
                2.0 * parameter.numel() * (expert_share if is_stack else 1) if parameter.dim() >= 2 else 0.0,
                shape[0] if is_stack and has_own_products(module) else 0,
                is_late(module, key),
            )


def _num_experts(config: PretrainedConfig) -> tuple[int, int]:
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


def chosen_share(config: PretrainedConfig) -> float:
    """Share of a layer's experts that a row chooses."""
    num_experts, num_chosen = _num_experts(config)
    return num_chosen / num_experts


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
