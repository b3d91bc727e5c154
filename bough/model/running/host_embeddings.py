"""Token embeddings in host memory: a sweep looks up only a few of their rows, so they need no GPU memory."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from bough.model.batch.batch import Batch
from bough.model.loading.loading import ParameterSlot, Skeleton


def embeddings_for_host(model: PreTrainedModel, device_type: str) -> nn.Module | None:
    """The embeddings, if they may stay on the host: with a GPU, and with a separate matrix in the output head."""
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = bool(getattr(model.config, "tie_word_embeddings", False)) or head is None
    if device_type == "cpu" or is_tied or embeddings is not getattr(model.get_decoder(), "embed_tokens", None):
        return None
    return embeddings if isinstance(embeddings, nn.Module) else None


def split_slots(skeleton: Skeleton, host: nn.Module | None) -> tuple[list[ParameterSlot], list[ParameterSlot]]:
    """Slots to load permanently to the device, and to the host."""
    slots = skeleton.resident_slots
    return [slot for slot in slots if slot.module is not host], [slot for slot in slots if slot.module is host]


def between_layers(skeleton: Skeleton) -> list[ParameterSlot]:
    """Slots of neither embeddings nor output head, such as the final norm, for a process that has only layers."""
    ends = [skeleton.model.get_input_embeddings(), skeleton.model.get_output_embeddings()]
    return [slot for slot in skeleton.resident_slots if slot.module not in ends]


def host_bytes(skeleton: Skeleton, device_type: str) -> int:
    """Bytes of embeddings on the host; 0 if they are on the device."""
    host = embeddings_for_host(skeleton.model, device_type)
    _, slots = split_slots(skeleton, host)
    return sum(torch.Size(slot.source.shape).numel() for slot in slots) * skeleton.dtype.itemsize if host else 0


def looked_up(host: nn.Module, batch: Batch, device: torch.device) -> torch.Tensor:
    """Embeddings (1, num_rows, hidden_size) of a batch's tokens, on the device."""
    rows: torch.Tensor = host(batch.host_ids)
    return rows.to(device)
