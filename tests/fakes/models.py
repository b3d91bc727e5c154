"""A streamed model assembled as in the target worker, for tests of its parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from bough.model.batch.batch import Batch, Segment
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.kv.session_kv import KVSlot
from bough.model.kv.states import by_kv_place
from bough.model.loading.loading import build_skeleton
from bough.sizing.placement import Budgets, Fixed, Tier, place
from bough.trees.tree import Tree
from loadtest.common.inline_streams import InlineStreams
from target_worker.kv.kv_offload import OffloadedKV
from target_worker.link.layer_extents import LayerExperts, LayerExtents, plan_apart, plan_layer, sizes_of
from target_worker.link.streams import DeviceStreams
from target_worker.sweep.streamed_model import StageLayers, StreamedModel
from target_worker.sweep.tiers import Tiers

CPU = torch.device("cpu")


@contextmanager
def streamed(
    folder: Path,
    dtype: torch.dtype,
    rows: int = 16,
    max_resident: int = 0,
    streams: DeviceStreams | None = None,
    host_layers: int = 0,
    staged_rows: int = 0,
    expert_slabs: int = 0,
    device: torch.device = CPU,
    kv_streams: DeviceStreams | None = None,
    elsewhere: Mapping[int, torch.device] | None = None,
    kv_elsewhere: Mapping[int, DeviceStreams] | None = None,
    stage: StageLayers | None = None,
) -> Iterator[StreamedModel]:
    """A model whose layers, except `max_resident` of them, stream through a ring of two slabs.

    With `streams`, `device` has memory of its own and `host_layers` layers stay in host memory. With `staged_rows`, KV
    of up to so many rows stays on the host and is copied layer by layer. With `expert_slabs`, experts are read when
    rows choose them. Layers `elsewhere` stay whole on other devices; `kv_elsewhere` are the streams for their KV. The
    model has the layers of `stage`, by default all.
    """
    kept = None if stage is None else tuple(range(stage.first, stage.end))
    skeleton = build_skeleton(Checkpoint.open(folder), dtype, kept)
    layers: Sequence[LayerExtents] = [plan_layer(f"layer {i}", slots) for i, slots in enumerate(skeleton.layer_slots)]
    experts: dict[int, LayerExperts] = {}
    if expert_slabs:
        apart, all_experts = plan_apart(skeleton.layer_slots)
        layers = [layer if i in (elsewhere or {}) else apart[i] for i, layer in enumerate(layers)]
        experts = {i: own for i, own in all_experts.items() if i not in (elsewhere or {})}
    sizes = [layer.num_bytes for layer in layers]
    host = host_layers * max(sizes)
    budgets = Budgets(device=sum(sizes) * 2, host=host, ring=2 * max(sizes), max_resident=max_resident)
    placement = place(sizes, Fixed(0, 0, 0, 0), budgets)
    if experts:
        room = expert_slabs * sizes_of(experts.values()).slab_bytes
        placement = replace(placement, fixed=replace(placement.fixed, experts=room))
    if elsewhere:
        tiers_of = [Tier.ELSEWHERE if i in elsewhere else tier for i, tier in enumerate(placement.tiers)]
        placement = replace(placement, tiers=tuple(tiers_of))
    with Tiers(layers, placement, 2, streams, experts, elsewhere) as tiers:
        kv_streams = kv_streams or InlineStreams()
        on_others = by_kv_place(skeleton.config, kv_elsewhere or {})
        kv = OffloadedKV(skeleton.kv_shape(), staged_rows, kv_streams, on_others) if staged_rows else None
        yield StreamedModel(skeleton, tiers, rows, device, kv, stage)


def plan_of(folder: Path) -> dict[int, LayerExperts]:
    """The experts of each layer of a mixture, as a target in bfloat16 plans them."""
    return plan_apart(build_skeleton(Checkpoint.open(folder), torch.bfloat16).layer_slots)[1]


def new_slot(model: StreamedModel) -> KVSlot:
    """A KV slot of 400 rows on the CPU."""
    return KVSlot(model.skeleton.kv_shape(), 400, CPU)


def plain_logits(model: StreamedModel, tokens: list[int]) -> list[torch.Tensor]:
    """Logits (vocab_size,) of plain decoding, one token a sweep; entry i follows tokens[: i + 1]."""
    return decode(model, new_slot(model), tokens)


def decode(model: StreamedModel, slot: KVSlot, tokens: list[int]) -> list[torch.Tensor]:
    """Logits (vocab_size,) after each of these tokens, which come after those of the slot, one a sweep."""
    logits = []
    for position, token in enumerate(tokens, slot.length):
        batch = Batch([Segment.tree(slot, position, Tree.root(token))], model.rows, CPU)
        logits.append(model.sweep(batch)[0][0].clone())
        slot.compact([position], [token])
    return logits
