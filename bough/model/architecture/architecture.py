"""Builds models from their configurations without weights, and decides which can run on trees."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from accelerate import init_empty_weights
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, initialization
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from bough.errors import CheckpointError
from bough.model.architecture.gated_delta import run_trees, why_not_recurrent
from bough.model.architecture.latent import absorbed, expanded, is_latent, keep_compressed, why_not_compressed
from bough.model.backend import backend_of
from bough.model.batch.batch import Chunk
from bough.model.checkpoint.gguf_model import FACTORS
from bough.model.checkpoint.model_places import container_of
from bough.model.kv.session_kv import KVShape
from bough.model.kv.state_shape import RECURRENT

ATTENTIONS = {"full_attention", "sliding_attention"}  # layer types in configurations that can run
PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")  # lists in configurations with an entry for each layer
# Errors that transformers raises for configurations that it cannot read, RuntimeError for what differs by layer.
UNREADABLE = (
    OSError, ValueError, LookupError, TypeError, AttributeError, StrictDataclassError, RuntimeError, AssertionError
)  # fmt: skip
BATCH_DEPENDENT_ROPES = ("dynamic", "longrope")  # beyond their original length all rows depend on the longest
NAME = "bough"  # of the attention function that is registered with transformers


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001
    scaling: float,
    chunk: Chunk,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    """Implements transformers' attention interface: (1, heads, rows, head_dim) in, (1, rows, heads, head_dim) out.

    Writes the rows' keys and values into their slots, then attends over the slots. `chunk` comes through the model's
    keyword arguments; the mask is implied by it. Every row attends to the keys on its own path, in the order of
    positions and in blocks fixed by position: its bits do not depend on the rest of the tree or the batch.
    """
    layer = cast(int, module.layer_idx)
    _require_room(chunk, layer, key, value)
    keys, values = (numbers[0].transpose(0, 1) for numbers in (key, value))
    queries = absorbed(module, query) if is_latent(module) else query[0].transpose(0, 1)
    rules = scaling, sliding_window or 0, softcap or 0.0, None if s_aux is None else s_aux.float()
    out = backend_of(query.device).attend(chunk, layer, queries, keys, values, *rules)
    return (expanded(module, out) if is_latent(module) else out)[None], None


def _require_room(chunk: Chunk, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """Check sizes before kernels write. Raises CheckpointError if the slots' sizes differ."""
    for piece in chunk.pieces[:1]:
        for name, numbers, held in (("keys", key, piece.slot.keys), ("values", value, piece.slot.values)):
            found, room = (numbers.shape[1], numbers.shape[3]), tuple(held.shape[2:])
            if found != room:
                raise CheckpointError(
                    f"config.json: {name} of all layers must be {room[0]} heads of {room[1]} numbers, as it says, got "
                    f"{found[0]} of {found[1]} in layer {layer}"
                )


AttentionInterface.register(NAME, tree_attention)


def load_config(path: Path) -> PretrainedConfig:
    """The configuration of the language model in a folder or a GGUF file.

    Raises:
        CheckpointError: transformers cannot read it.
    """
    container = container_of(path)
    try:
        return language_part(container.model_config())
    except UNREADABLE as exc:
        raise CheckpointError(f"{container.config_place}: {exc}") from exc


def _with_factors(config: PretrainedConfig, *_: Any, **__: Any) -> tuple[torch.Tensor, float]:
    """Rotary frequencies of a GGUF file with separate factors, and their scale."""
    rope, powers = config.rope_parameters, torch.arange(0, config.head_dim, 2, dtype=torch.float) / config.head_dim
    return 1.0 / (rope["rope_theta"] ** powers) / torch.tensor(rope["factors"]), 1.0


ROPE_INIT_FUNCTIONS[FACTORS] = _with_factors


def language_part(config: PretrainedConfig) -> PretrainedConfig:
    """The language model's part of a configuration: all of it, unless the model also processes images or audio.

    Weight dtype, quantization and tied embeddings are taken from the whole configuration.

    Raises:
        CheckpointError: it has no layers.
    """
    part: PretrainedConfig = config.get_text_config(decoder=True)
    if (num_layers := getattr(part, "num_hidden_layers", 1)) < 1:
        raise CheckpointError(f"config.json: num_hidden_layers must be at least 1, got {num_layers}")
    for name in ("dtype", "tie_word_embeddings", "quantization_config"):
        if part is not config and getattr(config, name, None) is not None:
            setattr(part, name, getattr(config, name))
    return part


def build_empty(config: PretrainedConfig, dtype: torch.dtype, kept: tuple[int, ...] | None = None) -> PreTrainedModel:
    """Build the architecture on the meta device: parameters have shapes but no memory.

    Only the layers `kept` stay, by default all, and `config` is cut to these. They are built as parts of the whole
    model, as some depend on the number of layers.

    Raises:
        CheckpointError: the architecture cannot run, with the reason, or has no such layers.
    """
    try:
        with init_empty_weights(include_buffers=False), initialization.no_init_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=NAME)
        reason = _why_not(model)
    except UNREADABLE as exc:
        reason = f"transformers does not build it as a language model with bough's attention: {exc!r}"
    if reason:
        raise CheckpointError(f"config.json: model_type {config.model_type!r} cannot be run: {reason}")
    if kept is not None:
        _keep_layers(model, kept)
    keep_compressed(model)
    run_trees(model)
    model.eval().requires_grad_(False)
    model.tie_weights()
    return model  # type: ignore[no-any-return]


def _keep_layers(model: PreTrainedModel, kept: tuple[int, ...]) -> None:
    """Remove all other layers from a model and its configuration, and number the rest from 0."""
    cut_layers(model.config, kept)
    decoder: Any = model.get_decoder()
    decoder.all_layers = [decoder.layers]  # in a list, as otherwise torch would take them for a part of the model
    decoder.layers = nn.ModuleList(decoder.layers[index] for index in kept)
    for index, layer in enumerate(decoder.layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = index


def _why_not(model: PreTrainedModel) -> str:
    """Why a model cannot run on trees; empty if it can.

    Each node of a tree has its own path, which attention can select from the keys in a slot; a recurrent state must be
    computed along it, by our own code for each kind of layer.
    """
    kinds = {*(getattr(model.config, "layer_types", None) or ())}
    others = sorted(kinds - ATTENTIONS - {RECURRENT})
    if RECURRENT in kinds and not others:
        if reason := why_not_recurrent(model.config):
            return reason
    elif model._is_stateful or others:
        which = f"layers of {', '.join(others)}" if others else "its layers"
        would_do = " or ".join(sorted(ATTENTIONS))
        return f"{which} keep a state, or choose keys in a way that trees do not allow; layers must be {would_do}"
    elif not model._supports_attention_backend:
        return "it computes attention by itself and not through transformers' attention interface"
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        return "its decoder does not list its layers as `layers`"
    if not all(any(hasattr(module, "layer_idx") for module in layer.modules()) for layer in layers):
        return "not all of its layers have attention"
    return _why_not_kept(model.config, layers)


def _why_not_kept(config: PretrainedConfig, layers: nn.ModuleList) -> str:
    """Why keys and values cannot be stored in slots, which have equal rows in every layer; empty if they can."""
    if getattr(config, "kv_lora_rank", None):
        return why_not_compressed(config, layers)
    if getattr(config, "num_kv_shared_layers", None):
        return "some of its layers attend to the keys of others, and have none themselves"
    if getattr(config, "cross_attention_layers", None):
        return "some of its layers attend to images, which are not part of a text"
    shape = KVShape.of(config, torch.float32)
    wanted = shape.num_kv_heads * shape.head_dim
    for index, layer in enumerate(layers):
        for name, module in layer.named_modules():
            is_either = name.rpartition(".")[2] in ("k_proj", "v_proj") and isinstance(module, nn.Linear)
            if is_either and module.out_features != wanted:
                return (
                    f"layer {index} makes {module.out_features} numbers in {name}, but {shape.num_kv_heads} heads of "
                    f"{shape.head_dim} are {wanted}; slots have the same size in every layer"
                )
    return ""


def cut_layers(config: PretrainedConfig, kept: tuple[int, ...]) -> None:
    """Reduce a configuration to these layers.

    Raises:
        CheckpointError: a layer does not exist, or none is kept.
    """
    wrong = [index for index in kept if not 0 <= index < config.num_hidden_layers]
    if wrong or not kept:
        raise CheckpointError(
            f"layers: must be of 0 to {config.num_hidden_layers - 1}, and at least one, got {wrong or kept}"
        )
    for name in PER_LAYER:
        if of_layers := getattr(config, name, None):
            setattr(config, name, [of_layers[index] for index in kept])
    if hasattr(config, "decoder_sparse_step"):
        dense, step = set(config.mlp_only_layers or ()), config.decoder_sparse_step
        is_dense = [index in dense or (index + 1) % step > 0 for index in kept]
        config.mlp_only_layers = [place for place, without_experts in enumerate(is_dense) if without_experts]
        config.decoder_sparse_step = 1
    if getattr(config, "first_k_dense_replace", None):
        config.first_k_dense_replace = sum(index < config.first_k_dense_replace for index in kept)
    config.num_hidden_layers = len(kept)


def describe(model: PreTrainedModel, dtype: torch.dtype) -> str:
    """Description of architecture, size and dtype."""
    config = model.config
    name = str(dtype).removeprefix("torch.")
    return f"{type(model).__name__}, {config.num_hidden_layers} layers of {config.hidden_size}, {name}"


def max_positions(config: PretrainedConfig) -> int:
    """The context length, within which rotary embeddings do not depend on the rest of the batch."""
    longest = int(config.max_position_embeddings)
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in nested or [parameters]:
        if rope.get("rope_type") in BATCH_DEPENDENT_ROPES:
            longest = min(longest, int(rope.get("original_max_position_embeddings") or longest))
    return longest
