"""KV on the host that streams with its layer: the right rows in any order of work, and the same bits as in place."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from bough.cli.flags.planning import PlanConfig
from bough.cli.planning.plan_model import make_plan
from bough.config.processes import TargetConfig, parse
from bough.errors import ConfigError
from bough.model.batch.batch import Batch, Segment
from bough.model.kv.session_kv import KVArena, KVShape, KVSlot
from bough.sizing.row_counts import RowCounts
from bough.trees.tree import Tree
from loadtest.common.inline_streams import InlineStreams
from loadtest.common.tiny_model import TINY, save_model
from target_worker.kv.kv_offload import OffloadedKV
from target_worker.worker import TargetWorker
from tests.fakes.gpu.late_device import FakeStreams
from tests.fakes.models import CPU, streamed
from tests.fakes.tiers import long_but

SHAPE, NUM_ROWS = KVShape(5, 2, 3, torch.float32), 75
ROWS = RowCounts(4, 8)


class Sessions:
    """Slots on the host, and what they ought to hold: a number for every token, layer and session."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        arena = KVArena(SHAPE, SHAPE.empty(NUM_ROWS, CPU))
        self.slots = [arena.take(NUM_ROWS // 3) for _ in range(3)]
        for slot, length in zip(self.slots, (0, 3, 5), strict=True):
            for layer, row in itertools.product(range(SHAPE.num_layers), range(length)):
                slot.keys[layer, row] = self.number(slot, layer, row)
                slot.values[layer, row] = -self.number(slot, layer, row)
            slot.tokens.extend([7] * length)

    def number(self, slot: KVSlot, layer: int, row: int) -> float:
        return float(1000 * self.slots.index(slot) + 100 * layer + row)

    def batch(self) -> Batch:
        """A few tokens more for some of them, a tree at the end of one."""
        segments = []
        for slot in self.rng.sample(self.slots, 2):
            size = self.rng.randrange(1, 4)
            segments.append(Segment.context(slot, slot.length, [7] * size))
            if not segments[1:]:
                segments.append(Segment.tree(slot, slot.length + size, Tree.of([1, 2, 3], [-1, 0, 0], [0.0] * 3)))
        return Batch(segments, ROWS, CPU)

    def commit(self, batch: Batch) -> None:
        for segment in batch.segments:
            if not segment.wants_logits:
                segment.slot.compact(segment.rows.tolist(), segment.tokens.tolist())

    def are_whole(self) -> bool:
        return all(
            torch.equal(held[layer, row], torch.full_like(held[layer, row], sign * self.number(slot, layer, row)))
            for slot in self.slots
            for sign, held in ((1, slot.keys), (-1, slot.values))
            for layer in range(SHAPE.num_layers)
            for row in range(slot.length)
        )


@contextmanager
def stage_over(seed: int) -> Iterator[tuple[Sessions, OffloadedKV, FakeStreams]]:
    streams = FakeStreams(seed)
    try:
        yield Sessions(seed), OffloadedKV(SHAPE, NUM_ROWS, streams), streams
    finally:
        streams.close()


def compute(sessions: Sessions, staged: Batch, layer: int) -> list[str]:
    """Attention, as far as memory is concerned: writes the new rows, and reads the older ones; what was wrong."""
    wrong = []
    for chunk in staged.chunks:
        keys, values = chunk.memory(layer)
        for piece in chunk.pieces:
            paths = chunk.paths_on_host()
            number = partial(sessions.number, piece.slot, layer)
            (origin,) = set(paths.origins[piece.span].tolist())
            for row, stored in zip(piece.rows.tolist(), paths.rows[piece.span].tolist(), strict=True):
                keys[stored], values[stored] = number(row), -number(row)
            for row in range(piece.slot.length):
                held = keys[origin + row], values[origin + row]
                if not all((rows == sign * number(row)).all() for sign, rows in zip((1, -1), held, strict=True)):
                    wrong.append(f"layer {layer}, row {row}: {held}, not {number(row)}")
    return wrong


class GivenUp(Exception):
    """A sweep's own."""


def sweep(sessions: Sessions, stage: OffloadedKV, streams: FakeStreams, batch: Batch, last: int = -1) -> list[str]:
    """What was wrong with what any layer saw; given up when layer `last` is queued, if there is one."""
    wrong: list[str] = []
    with stage.sweep(batch) as staged:
        for layer in range(SHAPE.num_layers):
            with stage.layer(layer):
                if layer == last:
                    for _ in range(20):
                        streams.compute(lambda: time.sleep(0.001))  # the device is behind
                streams.compute(lambda layer=layer: wrong.extend(compute(sessions, staged, layer)))
                if layer == last:
                    raise GivenUp
        streams.compute_event().synchronize()  # as the caller that wants the logits does
    return wrong


@pytest.mark.parametrize("seed", range(12))
def test_every_layer_sees_its_slots_rows_and_new_rows_are_stored(seed: int) -> None:
    with stage_over(seed) as (sessions, stage, streams):
        for _ in range(4):
            batch = sessions.batch()
            assert sweep(sessions, stage, streams, batch) == []
            sessions.commit(batch)
            assert sessions.are_whole()


@pytest.mark.parametrize("seed", range(6))
def test_an_abandoned_sweep_leaves_no_trace(seed: int) -> None:
    """What it has queued may still be computed when the next one begins."""
    with stage_over(seed) as (sessions, stage, streams):
        for last in range(SHAPE.num_layers):
            with pytest.raises(GivenUp):
                sweep(sessions, stage, streams, sessions.batch(), last)
            batch = sessions.batch()
            assert sweep(sessions, stage, streams, batch) == []
            sessions.commit(batch)
            assert sessions.are_whole()


def two_rounds(folder: Path, dtype: torch.dtype, staged_rows: int) -> tuple[list[torch.Tensor], int]:
    """Logits of prompts and trees of two sessions, in several chunks, then of more on top of what they came to."""
    logits, num_bytes = [], 0
    with streamed(folder, dtype, streams=InlineStreams(), host_layers=9, staged_rows=staged_rows) as model:
        shape = model.skeleton.kv_shape()
        arena = KVArena(shape, shape.empty(200, CPU))
        slots = [arena.take(90), arena.take(90)]
        tree = Tree.of([5, 6, 7, 8], [-1, 0, 0, 2], [0.0] * 4)
        for sizes in ((9, 70), (8, 1)):
            segments = []
            for slot, size in zip(slots, sizes, strict=True):
                context = [token % 90 for token in range(size)]
                segments.append(Segment.context(slot, slot.length, context))
                segments.append(Segment.tree(slot, slot.length + size, tree))
            result, _ = model.sweep(Batch(segments, model.rows, CPU))
            logits.append(result.clone())
            num_bytes += model.kv_bytes
            for context, guesses in zip(segments[::2], segments[1::2], strict=True):
                context.slot.compact(context.rows.tolist(), context.tokens.tolist())
                context.slot.compact(guesses.rows[[0, 2, 3]].tolist(), [5, 7, 8])
    return logits, num_bytes


@pytest.mark.parametrize("dtype", long_but([torch.bfloat16], [torch.bfloat16, torch.float32, torch.float16]))
def test_offloaded_kv_gives_the_same_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = save_model(tmp_path / "model", TINY)
    (in_place, nothing), (staged, num_bytes) = (two_rounds(folder, dtype, rows) for rows in (0, 200))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(staged, in_place, strict=True))
    assert nothing == 0
    held, added = (12 + 73), (13 + 74) + (12 + 5)
    assert num_bytes == (held + added) * KVShape.of(AutoConfig.from_pretrained(folder), dtype).row_bytes


def test_a_cpu_has_no_other_place_for_kv(tiny: Path) -> None:
    flags = ["--model", str(tiny), "--device", "cpu", "--kv-tier", "host"]
    with pytest.raises(ConfigError, match="--kv-tier: must be device on the CPU, got host"):
        TargetWorker(parse(TargetConfig, "t", flags, {}), "t")
    with pytest.raises(ConfigError, match="--kv-tier: must be device on the CPU, got host"):
        make_plan(parse(PlanConfig, "plan", flags, {}))
    with pytest.raises(ConfigError, match="--kv-tier: must be device, host, got 'disk'"):
        parse(TargetConfig, "t", [*flags[:-1], "disk"], {})
