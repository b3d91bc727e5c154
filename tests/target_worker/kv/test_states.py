"""Sessions of a model with recurrent layers: their states continue, return and are shared with the same bits."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bough.errors import ConfigError, Exhausted, StreamError
from bough.model.architecture import gated_delta
from bough.model.backend import backend_of
from bough.model.batch.batch import Batch, Segment
from bough.model.kv.session_kv import KVArena
from bough.model.kv.states import LayerState
from bough.model.sizes.target_limits import TargetLimits
from bough.protocol.ids import ScopedId
from bough.trees.tree import Tree
from loadtest.common.tiny_model import save_model
from target_worker.kv.slot_index import SessionSlot, Text
from target_worker.kv.slot_pool import SlotPool
from target_worker.sweep.streamed_model import StreamedModel
from tests.fakes.model.families import FAMILIES
from tests.fakes.models import CPU, new_slot, streamed
from tests.fakes.target import Clock

PROMPT = [(7 * i) % 250 for i in range(70)]  # two whole blocks and a bit
NUM_ROWS, NUM_SLOTS = 800, 2


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("hybrid"), FAMILIES["qwen3.5, recurrent layers"])


@pytest.fixture(scope="module")
def model(hybrid: Path) -> Iterator[StreamedModel]:
    with streamed(hybrid, torch.bfloat16, rows=32) as model:
        yield model


@pytest.fixture
def pool(model: StreamedModel) -> SlotPool:
    shape = model.skeleton.kv_shape()
    return SlotPool(KVArena(shape, shape.empty(NUM_ROWS, CPU), most_slots=NUM_SLOTS), 10.0, Clock())


def say(model: StreamedModel, pool: SlotPool, name: str, tokens: list[int], tree: Tree) -> torch.Tensor:
    """Logits of a tree below a text; what of the text the session lacks is computed and committed."""
    session = lease(pool, name, tokens)
    begin, slot = session.slot.length, session.slot
    context = Segment.context(slot, begin, tokens[begin:])
    logits = model.sweep(Batch([context, Segment.tree(slot, len(tokens), tree)], model.rows, CPU))[0].clone()
    pool.commit(session, range(begin, len(tokens)), tokens[begin:])
    return logits


def lease(pool: SlotPool, name: str, tokens: list[int]) -> SessionSlot:
    session = pool.lease(ScopedId(name), 1, 150, Text(tokens))
    pool.end_call(session)
    return session


def afresh(model: StreamedModel, text: list[int], root: int) -> torch.Tensor:
    """Logits after a text and a token, computed from the beginning."""
    slot = new_slot(model)
    segments = Segment.context(slot, 0, text), Segment.tree(slot, len(text), Tree.root(root))
    return model.sweep(Batch(segments, model.rows, CPU))[0][0].clone()


FORKED = Tree.of([9, 8, 7, 6, 5], [-1, 0, 0, 1, 3], [0.0] * 5)


def test_only_an_accepted_path_enters_the_states(model: StreamedModel, pool: SlotPool) -> None:
    say(model, pool, "a", PROMPT, FORKED)
    session = lease(pool, "a", PROMPT)
    pool.commit(session, [70, 71, 73], [9, 8, 6])
    text = [*PROMPT, 9, 8, 6]
    assert torch.equal(say(model, pool, "a", text, Tree.root(3))[0], afresh(model, text, 3))
    again = say(model, pool, "a", text[:71], Tree.root(2))[0]  # within the path, which the states have passed
    assert torch.equal(again, afresh(model, text[:71], 2))


def test_a_shortened_text_continues_from_a_snapshot(model: StreamedModel, pool: SlotPool) -> None:
    say(model, pool, "a", PROMPT, FORKED)
    other = [*PROMPT[:66], 1, 2, 3]
    assert lease(pool, "a", other).slot.length == 64
    assert torch.equal(say(model, pool, "a", other, Tree.root(4))[0], afresh(model, other, 4))
    assert lease(pool, "a", [1, *PROMPT]).slot.length == 0
    assert torch.equal(say(model, pool, "a", [1, 2], Tree.root(4))[0], afresh(model, [1, 2], 4))


def test_states_are_restored_while_kv_is_on_the_host(hybrid: Path, model: StreamedModel, pool: SlotPool) -> None:
    """Bits are those of a model that has them in place."""
    with streamed(hybrid, torch.bfloat16, rows=32, staged_rows=NUM_ROWS) as copied:
        say(copied, pool, "a", PROMPT, FORKED)
        pool.commit(lease(pool, "a", PROMPT), [70, 71, 73], [9, 8, 6])
        for text, num_kept in (([*PROMPT, 9, 8, 6], 73), ([*PROMPT[:66], 1], 64)):
            assert lease(pool, "a", text).slot.length == num_kept
            assert torch.equal(say(copied, pool, "a", text, Tree.root(3))[0], afresh(model, text, 3))


def test_a_prefix_is_shared_from_a_snapshot_and_the_second_session_leaves_one(
    model: StreamedModel, pool: SlotPool
) -> None:
    say(model, pool, "a", PROMPT, FORKED)
    second, third = [*PROMPT[:40], *range(60)], [*PROMPT[:35], *range(90, 120)]
    assert lease(pool, "b", second).slot.length == 0  # the first has none where the texts part
    assert torch.equal(say(model, pool, "b", second, Tree.root(4))[0], afresh(model, second, 4))
    pool.release(ScopedId("a"))
    assert lease(pool, "c", third).slot.length == 32
    assert torch.equal(say(model, pool, "c", third, Tree.root(4))[0], afresh(model, third, 4))
    pool.check_integrity()


def test_sessions_in_use_are_limited_by_memory_for_states(pool: SlotPool) -> None:
    for name in ("a", "b"):
        lease(pool, name, PROMPT)
    with pytest.raises(Exhausted, match="the states of 2 sessions in use fill it"):
        lease(pool, "c", PROMPT)
    pool.release(ScopedId("a"))
    lease(pool, "c", [5, 6])
    assert len(pool) == NUM_SLOTS


@pytest.mark.parametrize("num_context", [0, 3])
def test_a_session_continues_after_a_failed_sweep(
    model: StreamedModel, pool: SlotPool, monkeypatch: pytest.MonkeyPatch, num_context: int
) -> None:
    say(model, pool, "a", PROMPT, FORKED)
    pool.commit(session := lease(pool, "a", PROMPT), [70, 71], [9, 8])
    text = [*PROMPT, 9, 8, 1, 2, 3][: 72 + num_context]

    def breaks(index: int, layer: object = model.tiers.layer) -> object:
        if index == 1:
            raise StreamError("no disk")
        return layer(index)

    with monkeypatch.context() as patch:
        patch.setattr(model.tiers, "layer", breaks)
        with pytest.raises(StreamError):
            say(model, pool, "a", text, FORKED)
    pool.drop_partial(session)
    assert session.slot.length == (64 if num_context else 72)
    assert torch.equal(say(model, pool, "a", text, Tree.root(4))[0], afresh(model, text, 4))


def test_an_incomplete_state_is_not_used(model: StreamedModel, pool: SlotPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is done, and then there is no memory for what follows."""
    say(model, pool, "a", PROMPT, FORKED)
    pool.commit(session := lease(pool, "a", PROMPT), [70, 71], [9, 8])

    recur = backend_of(CPU).recur

    def breaks(*arguments: Any) -> torch.Tensor:
        recur(*arguments)
        raise StreamError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(backend_of(CPU), "recur", breaks)
        with pytest.raises(StreamError):
            say(model, pool, "a", [*PROMPT, 9, 8], FORKED)
    pool.drop_partial(session)
    assert session.slot.length == 64
    text = [*PROMPT, 9, 8]
    assert torch.equal(say(model, pool, "a", text, Tree.root(4))[0], afresh(model, text, 4))


def test_the_shortest_snapshot_is_kept_for_others_and_the_longest_for_the_session(model: StreamedModel) -> None:
    states = model.skeleton.kv_shape().states
    assert states is not None
    layer = LayerState(states, CPU)
    for layer.length in (16, 64, 128, 192):
        layer.snap()
    assert {*layer.snapshots} == {16, 192}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"linear_num_value_heads": 3}, "linear_num_value_heads must be a multiple of linear_num_key_heads, 2, got 3"),
        ({"hidden_act": "gelu"}, "must be 'silu', got 'gelu'"),
    ],
)
def test_unsupported_recurrent_layers_are_refused(change: dict[str, Any], problem: str) -> None:
    config = copy.deepcopy(FAMILIES["qwen3.5, recurrent layers"])
    config.update(change)
    assert problem in gated_delta.why_not_recurrent(config)


def test_memory_for_a_number_of_sessions_is_for_the_longest_ones() -> None:
    limits = TargetLimits(rows=32, max_sweep_tokens=64, max_nodes=50, max_context=350, kv_sessions=3)
    assert limits.num_states(10, 3 * (4000 + 3000), 3000) == 3
    assert limits.num_rows(10, 3 * (4000 + 3000), 3000) == 1200


def test_memory_is_divided_between_rows_and_states() -> None:
    limits = TargetLimits(rows=32, max_sweep_tokens=64, max_nodes=50, max_context=350)
    assert limits.num_states(10, 20_000, 3000) == 5
    assert limits.num_rows(10, 20_000, 3000) == 500
    with pytest.raises(ConfigError, match="--kv-memory: must be at least 7000 bytes"):
        limits.num_rows(10, 6_999, 3000)
