"""A target whose layers are at several processes: bit for bit that of one process, for any cut and any load."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from bough.config.processes import TargetConfig, parse
from bough.errors import NotFound
from bough.model.batch.batch import Batch
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.kv.arena import Arena
from bough.model.kv.session_kv import KVArena
from bough.model.kv.slot import Segment
from bough.protocol.ids import ScopedId
from loadtest.common.inline_streams import InlineStreams
from loadtest.common.tiny_model import save_model
from target_worker.kv.slot_index import Text
from target_worker.kv.slot_pool import SlotPool
from target_worker.stages.slots import MirroredSlots
from target_worker.sweep import held_layers
from target_worker.sweep.held_layers import HeldLayers
from target_worker.sweep.streamed_model import StageLayers, StreamedModel
from tests.fakes.model.families import FAMILIES, random_tree
from tests.fakes.models import CPU, streamed
from tests.fakes.staged_models import StagedModel, staged
from tests.fakes.target import Clock

NUM_ROWS = 460  # fewer than the sessions want: slots move, and idle ones are cut and evicted
NUM_SWEEPS = 12
SHORT = ["llama", "gemma3, local and global", "qwen3.5, recurrent layers"]  # compiled layers, others, states
HYBRID = ("qwen3 next", "qwen3.5")


def conversation(
    model: StreamedModel | StagedModel, arena: Arena, seed: int, two_in_flight: bool = False
) -> list[torch.Tensor]:
    """The logits of sweeps over random sessions, which share prefixes, accept paths, and come and go.

    With `two_in_flight` a sweep's paths are accepted when the next one has begun.
    """
    rng, pool, logits = np.random.default_rng(seed), SlotPool(arena, 10.0, Clock()), list[torch.Tensor]()
    texts: dict[str, list[int]] = {}
    common = rng.integers(0, 250, 70).tolist()
    away, committing = list[str](), list[Callable[[], None]]()
    for _ in range(NUM_SWEEPS):
        segments, before, committing = list[Segment](), committing, []
        if not two_in_flight:
            finish(before)
        free = [name for name in "abcdef" if name not in away]
        away = rng.choice(free, size=int(rng.integers(1, 3)), replace=False).tolist()
        for name in away:
            if name in texts and rng.random() < 0.2:
                del texts[name]
                with suppress(NotFound):  # it was evicted
                    pool.release(ScopedId(name))
            start = texts.get(name, common[: int(rng.integers(30, 70))])
            text = [*start, *rng.integers(0, 250, int(rng.integers(1, 6))).tolist()]
            tree = random_tree(rng, int(rng.integers(1, 12)), int(rng.integers(250)))
            session = pool.lease(ScopedId(name), 1, len(text) + len(tree) + 8, Text(text))
            begin = session.slot.length
            session.slot.num_in_sweep = len(text) - begin + len(tree)
            segments += [
                Segment.context(session.slot, begin, text[begin:]), Segment.tree(session.slot, len(text), tree)
            ]  # fmt: skip
            path = tree.path(int(rng.integers(len(tree))))
            rows, tokens = range(begin, len(text)), [int(tree.tokens[node]) for node in path]

            def commit(session=session, rows=rows, text=text, path=path, tokens=tokens) -> None:  # type: ignore[no-untyped-def]
                pool.commit(session, rows, text[rows.start :])
                pool.commit(session, [len(text) + node for node in path], tokens)
                pool.end_lease(session)

            committing.append(commit)
            texts[name] = [*text, *tokens]
        logits.append(model.sweep(Batch(segments, model.rows, CPU))[0].clone())
        finish(before)
    return logits


def finish(committing: list[Callable[[], None]]) -> None:
    while committing:
        committing.pop(0)()


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in FAMILIES]
)
def test_stages_compute_the_bits_of_one_process(family: str, tmp_path: Path) -> None:
    folder, has_states = save_model(tmp_path / "model", FAMILIES[family]), family.startswith(HYBRID)
    most_slots = 5 if has_states else 0
    for dtype in (torch.bfloat16, torch.float32):
        with streamed(folder, dtype) as whole:
            shape = whole.skeleton.kv_shape()
            wanted = conversation(whole, KVArena(shape, shape.empty(NUM_ROWS, CPU), most_slots=most_slots), 1)
        for cuts in ([2],) if has_states else ([1], [1, 2, 3]):
            with staged(folder, dtype, cuts, NUM_ROWS, most_slots) as target:
                found = conversation(target, target.arena, 1, two_in_flight=cuts != [1])
            assert all(map(torch.equal, found, wanted))
            assert len(found) == len(wanted)
            assert len(target.num_bytes) == len(cuts) * NUM_SWEEPS


@pytest.mark.parametrize("family", ["qwen2 moe, shared expert", "qwen3.5, recurrent layers"])
def test_a_part_computes_as_the_whole_model_whatever_its_own_layers_are(family: str, tmp_path: Path) -> None:
    """A layer without experts or states has other products in a model of such layers alone."""
    folder = save_model(tmp_path / "model", FAMILIES[family])
    with streamed(folder, torch.float32) as whole, staged(folder, torch.float32, [1, 2, 3]) as target:
        for part in (target.model, *(stage._model for stage in target.stages)):
            assert (part.rows, part.arithmetic) == (whole.rows, whole.arithmetic)


def test_a_stage_of_recurrent_layers_alone_has_no_kv_to_keep_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, dtype = save_model(tmp_path / "model", FAMILIES["qwen3.5, recurrent layers"]), torch.float32
    with streamed(folder, dtype) as whole:
        shape = whole.skeleton.kv_shape()
        wanted = conversation(whole, KVArena(shape, shape.empty(NUM_ROWS, CPU), most_slots=5), 1)
    config = parse(TargetConfig, "t", ["--model", str(folder), "--dtype", "float32", "--kv-tier", "host"], {})
    held = HeldLayers(config, Checkpoint.open(str(folder)), StageLayers(3, 4, 4))
    monkeypatch.setattr(held_layers, "streams_of", lambda _: InlineStreams())  # as of a GPU
    with ExitStack() as resources, staged(folder, dtype, [3], NUM_ROWS, 5) as target:
        (stage,) = target.stages
        stage._model._kv = held._make_memory(resources, NUM_ROWS)
        stage.slots = MirroredSlots(held.skeleton.kv_shape(), held.memory)
        assert all(map(torch.equal, conversation(target, target.arena, 1), wanted))
