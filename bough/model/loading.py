"""Builds a model from its configuration with no weights in it, and finds the weights that belong in each place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from bough.errors import CheckpointError
from bough.model import attention
from bough.model.checkpoint import Checkpoint, TensorPlace
from bough.model.kv import KVShape

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SAFETENSORS_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True, slots=True)
class ParameterSlot:
    """One parameter of a module: the table that holds it, its key there, and where its bytes are."""

    table: dict[str, nn.Parameter | None]
    key: str
    place: TensorPlace

    def bind(self, tensor: torch.Tensor) -> None:
        """Puts a tensor in the parameter's place."""
        self.table[self.key] = nn.Parameter(tensor, requires_grad=False)


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A transformers model on the meta device, and the places of its weights."""

    model: PreTrainedModel
    config: PretrainedConfig
    layers: tuple[nn.Module, ...]
    layer_slots: tuple[tuple[ParameterSlot, ...], ...]  # one tuple for each layer
    resident_slots: tuple[ParameterSlot, ...]  # embeddings, final norm, output head
    dtype: torch.dtype

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def max_positions(self) -> int:
        return int(self.config.max_position_embeddings)

    def kv_shape(self) -> KVShape:
        """What one token's keys and values take."""
        heads = int(self.config.num_attention_heads)
        kv_heads = int(getattr(self.config, "num_key_value_heads", None) or heads)
        head_dim = int(getattr(self.config, "head_dim", None) or self.config.hidden_size // heads)
        return KVShape(len(self.layers), kv_heads, head_dim, self.dtype)

    def describe(self) -> str:
        """Architecture, size and data type in words."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{type(self.model).__name__}, {len(self.layers)} layers of {self.config.hidden_size}, {dtype}"


def load_config(checkpoint: Checkpoint) -> PretrainedConfig:
    """The configuration of a checkpoint.

    Raises:
        CheckpointError: where transformers cannot read it.
    """
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(checkpoint.folder)
    except (OSError, ValueError, KeyError) as exc:
        raise CheckpointError(f"{checkpoint.folder / 'config.json'}: {exc}") from exc
    return config


def build_skeleton(checkpoint: Checkpoint, dtype: torch.dtype, keep_layers: tuple[int, ...] | None = None) -> Skeleton:
    """Builds the model on the meta device; `keep_layers` names the layers of the checkpoint to use, all by default.

    Raises:
        CheckpointError: naming a tensor that is missing or has another shape than the architecture wants.
    """
    config = load_config(checkpoint)
    kept = keep_layers if keep_layers is not None else tuple(range(config.num_hidden_layers))
    _cut_layers(config, kept)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.NAME)
    model.eval().requires_grad_(False)
    model.tie_weights()
    layers = tuple(model.get_decoder().layers)
    prefix = next(name for name, module in model.named_modules() if module is model.get_decoder().layers)
    names = {f"{prefix}.{index}": f"{prefix}.{original}" for index, original in enumerate(kept)}
    layer_slots = tuple(
        tuple(_slots(layer, lambda name, i=i: f"{names[f'{prefix}.{i}']}.{name}", checkpoint))  # type: ignore[misc]
        for i, layer in enumerate(layers)
    )
    in_layers = {id(module) for layer in layers for module in layer.modules()}
    resident = tuple(_slots(model, lambda name: name, checkpoint, in_layers, _tied_names(model)))
    return Skeleton(model, config, layers, layer_slots, resident, dtype)


def _cut_layers(config: PretrainedConfig, kept: tuple[int, ...]) -> None:
    wrong = [index for index in kept if not 0 <= index < config.num_hidden_layers]
    if wrong or not kept:
        raise CheckpointError(
            f"layers: {wrong or kept} to keep of a model that has 0 to {config.num_hidden_layers - 1}"
        )
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[index] for index in kept]
    config.num_hidden_layers = len(kept)


def _slots(
    root: nn.Module,
    full_name: Callable[[str], str],
    checkpoint: Checkpoint,
    skip: set[int] = frozenset(),  # type: ignore[assignment]
    tied: Mapping[str, str] | None = None,
) -> Iterator[ParameterSlot]:
    for module_name, module in root.named_modules():
        if id(module) in skip:
            continue
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = full_name(f"{module_name}.{key}" if module_name else key)
            place = _find(checkpoint, name, (tied or {}).get(name))
            if place.shape != tuple(parameter.shape):
                raise CheckpointError(
                    f"{place.file}: tensor {place.name} has shape {list(place.shape)}, "
                    f"but config.json asks for {list(parameter.shape)}"
                )
            yield ParameterSlot(module._parameters, key, place)


def _find(checkpoint: Checkpoint, name: str, tied_to: str | None) -> TensorPlace:
    place = checkpoint.tensors.get(name) or checkpoint.tensors.get(tied_to or "")
    if place is None:
        raise CheckpointError(f"{checkpoint.folder}: tensor {name}, which config.json asks for, is missing")
    if place.dtype not in SAFETENSORS_DTYPES:
        raise CheckpointError(
            f"{place.file}: tensor {name} is stored as {place.dtype}; {', '.join(SAFETENSORS_DTYPES)} can be read"
        )
    return place


def _tied_names(model: PreTrainedModel) -> Mapping[str, str]:
    if not getattr(model.config, "tie_word_embeddings", False):
        return {}
    return dict(getattr(model, "_tied_weights_keys", None) or {})


def bind_resident(slots: tuple[ParameterSlot, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Loads parameters for good; a tensor that several parameters share is loaded once."""
    loaded: dict[str, torch.Tensor] = {}
    for slot in slots:
        place = slot.place
        if place.name not in loaded:
            with safe_open(place.file, framework="pt") as file:
                loaded[place.name] = file.get_tensor(place.name).to(device=device, dtype=dtype)
        slot.bind(loaded[place.name])


def fixed_rows(function: Callable[..., torch.Tensor], rows: int) -> Callable[..., torch.Tensor]:
    """A function of (1, n, features) rows, called on `rows` rows at a time whatever n is.

    Matrix products of different row counts round differently; at one row count a row's result does not depend on its
    place or its neighbours (measured by tests/test_reproducible.py).
    """

    def run(hidden: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        count = hidden.shape[1]
        padded = nn.functional.pad(hidden, (0, 0, 0, max(rows, -(-count // rows) * rows) - count))
        parts = [function(padded[:, begin : begin + rows], **kwargs) for begin in range(0, padded.shape[1], rows)]
        return torch.cat(parts, dim=1)[:, :count]

    return run
