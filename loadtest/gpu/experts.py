"""Compares experts read from host memory on demand with whole layers; part of `loadtest.gpu`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from bough.model.batch.batch import Batch, Segment
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.kv.session_kv import KVSlot
from bough.model.loading.loading import build_skeleton
from bough.sizing.placement import Budgets, Fixed, place, place_with_expert_cache
from bough.trees.tree import Tree
from loadtest.common.tiny_model import save_weights
from loadtest.common.tiny_tokenizer import save_tokenizer
from loadtest.gpu.random_models import LINK_THREADS, planned
from target_worker.link.layer_extents import LayerExperts, LayerExtents, plan_apart, sizes_apart
from target_worker.link.streams import DeviceStreams
from target_worker.sweep.streamed_model import StreamedModel
from target_worker.sweep.tiers import Tiers

TREES = (1, 1, 4, 16, 64)
REPEATS = 5
NUM_TOKENS = 256  # the tokenizer's byte tokens


class Mixture(NamedTuple):
    """Sizes of a mixture of experts; an expert has 3 MB."""

    layers: int
    experts: int  # in a layer
    chosen: int  # experts chosen by each row


class _Swept(NamedTuple):
    logits: list[torch.Tensor]
    seconds: list[float]  # of sweeps with different trees
    gigabytes: list[float]  # over the link, by sweep


def experts(
    device: torch.device, rows: int, mixture: Mixture, folder: Path, new_streams: Callable[..., DeviceStreams]
) -> dict[str, Any]:
    """Sweep the same trees both ways and compare logits bit for bit.

    A third of the model stays on the device, or two layers if that is more.
    """
    save_mixture(folder, *mixture, 1)
    whole, chosen = (_swept(folder, device, rows, new_streams(device), is_apart) for is_apart in (False, True))
    pairs = zip(whole.logits, chosen.logits, strict=True)
    return {
        "tokens": TREES,
        "compared": len(TREES),
        "equal": sum(torch.equal(*pair) for pair in pairs),
        "whole": {"seconds": whole.seconds, "gigabytes": whole.gigabytes},
        "chosen": {"seconds": chosen.seconds, "gigabytes": chosen.gigabytes},
    }


def _swept(folder: Path, device: torch.device, rows: int, streams: DeviceStreams, is_apart: bool) -> _Swept:
    skeleton = build_skeleton(Checkpoint.open(folder), torch.bfloat16)
    layers: list[LayerExtents] = planned(skeleton)
    apart: dict[int, LayerExperts] = {}
    sizes, own = [layer.num_bytes for layer in layers], Fixed(0, 0, 0, 0)
    budgets = Budgets(max(sum(sizes) // 3, 2 * max(sizes)), 2 * sum(sizes), 2 * max(sizes), len(layers))
    placement = place(sizes, own, budgets)
    if is_apart:
        rest, apart = plan_apart(skeleton.layer_slots)
        placement = place_with_expert_cache(sizes, sizes_apart(rest, apart, skeleton.dtype), own, budgets, True, True)
        layers = list(rest)
    repeats = REPEATS if device.type != "cpu" else 1  # whose times mean nothing
    with Tiers(layers, placement, LINK_THREADS, streams, apart) as tiers:
        model = StreamedModel(skeleton, tiers, rows, device)
        first = [_sweep(model, size, seed=0)[0] for size in TREES]
        again = [[_sweep(model, size, seed) for seed in range(1, repeats + 1)] for size in TREES]
    return _Swept(
        first,
        [round(float(np.median([seconds for _, seconds, _ in some])), 5) for some in again],
        [round(float(np.median([num_bytes for _, _, num_bytes in some])) / 1e9, 4) for some in again],
    )


def _sweep(model: StreamedModel, size: int, seed: int) -> tuple[torch.Tensor, float, int]:
    """Sweep a random tree; returns logits, seconds, and bytes over the link."""
    slot = KVSlot(model.skeleton.kv_shape(), max(TREES), model.device)
    tree = random_tree(size, np.random.default_rng(seed))
    batch, began = Batch([Segment.tree(slot, 0, tree)], model.rows, model.device), time.perf_counter()
    logits, figures = model.sweep(batch)
    return logits.cpu().clone(), time.perf_counter() - began, figures.link_bytes


def save_mixture(folder: Path, layers: int, experts: int, chosen: int, seed: int, num_topics: int = 0) -> None:
    """Write a mixture of experts with random bfloat16 weights; an expert has 3 MB.

    With topics, token t belongs to topic t % `num_topics`, and tokens of a topic choose similar experts.
    """
    config = Qwen3MoeConfig(
        vocab_size=262,
        hidden_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,  # type: ignore[call-arg]  # it is among the fields, but transformers' types do not say so
        moe_intermediate_size=512,
        num_experts=experts,
        num_experts_per_tok=chosen,
        max_position_embeddings=1024,
        bos_token_id=260,
        eos_token_id=261,
        initializer_range=0.05,  # makes the router's choices uneven
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if num_topics:
        embeddings = model.get_input_embeddings().weight
        topics = torch.randn(num_topics, config.hidden_size)[torch.arange(len(embeddings)) % num_topics]
        with torch.no_grad():
            embeddings.copy_(topics + torch.randn_like(topics))
    save_weights(model, folder)
    save_tokenizer(folder)


def random_tree(num_nodes: int, rng: np.random.Generator) -> Tree:
    """A tree of random tokens."""
    parents = [-1] + [int(rng.integers(0, node)) for node in range(1, num_nodes)]
    return Tree.of(rng.integers(0, NUM_TOKENS, num_nodes).tolist(), parents, [0.0] * num_nodes)
