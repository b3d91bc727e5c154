"""Sweeps of a streamed model on the pretended device, and the same sweeps on the CPU for comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from bough.model.batch.batch import Batch, Segment
from bough.model.kv.session_kv import KVArena, split_memory
from bough.model.kv.states import by_kv_place
from bough.trees.tree import Tree
from loadtest.common.inline_streams import InlineStreams
from target_worker.kv.kv_offload import memory_on_host
from target_worker.sweep.streamed_model import StreamedModel
from tests.fakes.gpu import unpacking
from tests.fakes.gpu.pretend import device, notes, pretending
from tests.fakes.gpu.pretend_streams import ALWAYS, PretendedStreams
from tests.fakes.model.families import random_tree
from tests.fakes.models import CPU, streamed

NUM_ROWS = 200


@dataclass(frozen=True)
class Where:
    """Where layers, experts and KV are, and when copies run (see `PretendedStreams`)."""

    max_resident: int = 1
    host_layers: int = 2
    kv_on_host: bool = False
    expert_slabs: int = 0
    elsewhere: tuple[int, ...] = ()  # layers on a second device
    chance: float = ALWAYS
    seed: int = 0


@contextmanager
def on_the_device(folder: Path, where: Where, dtype: torch.dtype, rows: int = 16) -> Iterator[StreamedModel]:
    """A model on the pretended device, whose notes know when a layer is computed."""
    streams, *all_kv_streams = (PretendedStreams(where.chance, where.seed + n, n // 2) for n in range(3))
    host = 99 if where.expert_slabs else where.host_layers
    staged = NUM_ROWS if where.kv_on_host else 0
    with streamed(
        folder,
        dtype,
        rows,
        where.max_resident,
        streams,
        host,
        staged,
        where.expert_slabs,
        device(),
        all_kv_streams[0],
        dict.fromkeys(where.elsewhere, device(1)),
        dict.fromkeys(where.elsewhere, all_kv_streams[1]),
    ) as model:
        layer = model.tiers.layer

        @contextmanager
        def noted(index: int) -> Iterator[torch.Tensor]:
            with layer(index) as slab:
                notes.is_in_layer = True
                try:
                    yield slab
                finally:
                    notes.is_in_layer = False

        model.tiers.layer = noted
        try:
            yield model
        finally:
            for kv_streams in all_kv_streams:
                kv_streams.close()


def _arena(model: StreamedModel, kv: torch.device) -> KVArena:
    shape = model.skeleton.kv_shape()
    if kv.type == "cpu" and model.device.type != "cpu":
        return KVArena(shape, memory_on_host(shape, NUM_ROWS, InlineStreams()))
    where = by_kv_place(model.skeleton.config, model.tiers.elsewhere)
    return KVArena(shape, split_memory(shape, NUM_ROWS, kv, where))


def one_sweep(model: StreamedModel, kv: torch.device) -> torch.Tensor:
    """Logits of a root, in one chunk of rows."""
    slot = _arena(model, kv).take(NUM_ROWS)
    return model.sweep(Batch([Segment.tree(slot, 0, Tree.root(3))], model.rows, model.device))[0].cpu()


def three_sweeps(model: StreamedModel, kv: torch.device, counting: bool = False) -> torch.Tensor:
    """Logits of two sweeps after a prefill: of a tree and another root, then of a root after committing a path.

    With `counting`, the notes are cleared before the second sweep, and only its logits are returned.
    """
    arena = _arena(model, kv)
    first, second = arena.take(NUM_ROWS // 2), arena.take(NUM_ROWS // 2)

    def sweep(*segments: Segment) -> torch.Tensor:
        logits = model.sweep(Batch(segments, model.rows, model.device))[0]
        return logits if counting else logits.cpu()

    sweep(Segment.context(first, 0, [5, 6, 7, 8]), Segment.tree(second, 0, Tree.root(3)))
    first.compact(range(4), [5, 6, 7, 8])
    second.compact([0], [3])
    tree = random_tree(np.random.default_rng(1), 30, 9)
    if counting:
        notes.clear()
    logits = sweep(Segment.tree(first, 4, tree), Segment.tree(second, 1, Tree.root(4)))
    if counting:
        return logits
    path = tree.path(29)
    first.compact([4 + node for node in path], [int(tree.tokens[node]) for node in path])
    return torch.cat((logits, sweep(Segment.tree(first, first.length, Tree.root(11)))))


def on_cpu(folder: Path, dtype: torch.dtype, rows: int = 16) -> torch.Tensor:
    """The expected logits, computed on the CPU."""
    with streamed(folder, dtype, rows) as model:
        return three_sweeps(model, CPU).float()


def on_device(
    folder: Path,
    where: Where,
    dtype: torch.dtype,
    rows: int = 16,
    unpacking: ModuleType = unpacking,
    sweeps: Callable[[StreamedModel, torch.device], torch.Tensor] = three_sweeps,
) -> torch.Tensor:
    """The logits computed on the pretended device; asserts that there was no race."""
    with pretending(unpacking=unpacking), on_the_device(folder, where, dtype, rows) as model:
        logits = sweeps(model, CPU if where.kv_on_host else device())
    assert not notes.order.races, notes.order.races[:3]
    return logits.float()


def require_close(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    """Logits of four layers in float32 may differ as far as torch's products and ours round differently."""
    torch.testing.assert_close(mine, theirs, atol=1e-4 * float(theirs.abs().max()), rtol=0)
