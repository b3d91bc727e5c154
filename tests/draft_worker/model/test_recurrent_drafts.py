"""Drafts with recurrent layers: a session's guesses are always those of plain decoding."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch

from bough.cli.machine.memory_division import DraftNeeds, draft_needs
from bough.config.processes import DraftConfig, parse
from bough.errors import CheckpointError, ConfigError, Unavailable
from bough.grammar.allowed_tokens import Grammars
from bough.model.backend import backend_of
from bough.model.batch.batch import Batch, Segment
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.kv.session_kv import KVArena, KVSlot
from bough.model.kv.state_shape import GROWN_ROWS
from bough.model.running.runner import ResidentModel
from bough.model.threads import compute_with
from bough.protocol.ids import ScopedId
from bough.protocol.messages import GrowResult
from bough.tokenization.vocabulary import TokenizerFiles
from bough.trees.tree import Tree
from bough.trees.tree_plan import BestFirst, StaticShape, TreePlan
from draft_worker.candidates.candidates import TemperatureScalings
from draft_worker.engine.engine import DraftEngine
from draft_worker.engine.session import Window
from draft_worker.engine.session_pool import SessionPool
from draft_worker.model.model_draft import NUM_CONSIDERED, ModelDraft
from draft_worker.model.sources import draft_skeleton, load_draft
from draft_worker.worker import DraftWorker
from loadtest.common.tiny_model import save_model
from tests.fakes.draft import grow_call, grow_now, started
from tests.fakes.model.families import FAMILIES
from tests.fakes.models import CPU

VOCAB, MAX_CHILDREN = 262, 4
PROMPT = [(7 * i) % 250 for i in range(70)]  # two whole blocks and a bit
WIDE, DEEP = TreePlan(BestFirst(40, 8, 3)), TreePlan(StaticShape.chains(2, 8))
SHAPE = TreePlan(StaticShape((0, 0, 0, 1, 1, 2, 4, 7)))
TOLERANCE = 1e-4  # of log-probabilities in float32: products of other numbers of rows round otherwise


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A second one would help none of these few numbers, and waits for a busy processor at each of many operations."""
    before = torch.get_num_threads(), numba.get_num_threads()
    compute_with(1)
    yield
    torch.set_num_threads(before[0])
    numba.set_num_threads(before[1])


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("hybrid"), FAMILIES["qwen3.5, recurrent layers"])


@pytest.fixture(scope="module")
def model(hybrid: Path) -> ResidentModel:
    return load_draft(Checkpoint.open(hybrid), (), "float32", CPU)


def engine_of(
    model: ResidentModel, most_slots: int = 3, ahead_steps: int = 0, window: Window | None = None
) -> DraftEngine:
    """An engine with room for some sessions' states, and rows enough."""
    shape = model.skeleton.kv_shape()
    arena = KVArena(shape, shape.empty(4000, CPU), lambda slot: slot.num_rows, most_slots)
    pool = SessionPool(arena, window or Window(300, 600, GROWN_ROWS), state_bytes=shape.growing_bytes)
    draft = ModelDraft(model, Grammars(TokenizerFiles(b"", "", ()), VOCAB))
    return DraftEngine(draft, VOCAB, MAX_CHILDREN, pool, ahead_steps, TemperatureScalings(1.0))


def decoded(model: ResidentModel, text: Sequence[int], path: Sequence[int]) -> np.ndarray:
    """Log-probabilities of the draft's candidates after a path's tokens, decoded one by one after a text."""
    slot, rows = KVSlot(model.skeleton.kv_shape(), len(text) + len(path), CPU), []
    segments = [Segment.context(slot, 0, text)] if text else []
    for position, token in enumerate(path, len(text)):
        logits = model.logits(Batch([*segments, Segment.tree(slot, position, Tree.root(token))], None, CPU))
        rows.append((logits[0] - logits[0].topk(NUM_CONSIDERED).values.logsumexp(0)).numpy())
        slot.compact(range(slot.length, position + 1), [*text, *path][slot.length : position + 1])
        segments = []
    return np.stack(rows)


def check(model: ResidentModel, tokens: list[int], tree: Tree, start: int = 0) -> None:
    """Assert that guesses on some paths of a tree below a text, seen from `start` on, have their probabilities."""
    assert len(tree) > 1
    leaves = sorted({*range(len(tree))} - {*tree.parents.tolist()}, key=tree.depths().__getitem__)
    for leaf in {*leaves[:: 1 + len(leaves) // 3], leaves[-1]}:
        path = tree.path(leaf)
        rows = decoded(model, tokens[start:-1], tree.tokens[path[:-1]].tolist())
        wanted = rows[np.arange(len(rows)), tree.tokens[path[1:]]]
        assert tree.log_probs[path[1:]] == pytest.approx(wanted, abs=TOLERANCE)


def after(tokens: list[int], tree: Tree, take: int, bonus: int) -> list[int]:
    """The text when part of the deepest path was accepted, and then a token of the target's own."""
    path = tree.path(int(tree.depths().argmax()))[1 : 1 + take]
    return [*tokens, *tree.tokens[path].tolist(), bonus]


def inside(tree: Tree, take: int) -> int:
    """The token of the deepest path after that part of it: a bonus token below which nodes are known."""
    return int(tree.tokens[tree.path(int(tree.depths().argmax()))[1 + take]])


@pytest.mark.parametrize(("plan", "ahead_steps"), [(WIDE, 0), (WIDE, 9), (DEEP, 0), (SHAPE, 9)])
def test_guesses_equal_plain_decoding_in_every_round(model: ResidentModel, plan: TreePlan, ahead_steps: int) -> None:
    """Paths that end within the tree, at a leaf or at once; among them two that need no step in between."""
    engine, tokens, held = engine_of(model, ahead_steps=ahead_steps), PROMPT[:9], 0
    for take, is_inside in ((1, False), (0, True), (1, True), (0, False)):
        result = grow_now(engine, grow_call(tokens, held, plan=plan))
        check(model, tokens, result.tree)
        for _ in range(3):
            engine.step()
        tokens = after(tokens, result.tree, take, inside(result.tree, take) if is_inside else 5)
        held = result.held_length
    check(model, tokens, grow_now(engine, grow_call(tokens, held, plan=plan)).tree)


def test_accepted_paths_of_rounds_without_a_step_enter_the_states(model: ResidentModel) -> None:
    """A narrower tree needs only nodes that are known: the states are then two accepted paths behind."""
    engine, narrow = engine_of(model), TreePlan(BestFirst(3, 1, 2))
    tree, tokens = grow_now(engine, grow_call(PROMPT[:9], plan=DEEP)).tree, PROMPT[:9]
    passes, held = engine.num_passes, 8
    for take in (1, 1):
        tokens = after(tokens, tree, take - 1, inside(tree, take - 1))
        result = grow_now(engine, grow_call(tokens, held, plan=narrow))
        assert engine.num_passes == passes, "all of it was known"
        tree, held = result.tree, result.held_length
        check(model, tokens, tree)
    tokens = after(tokens, tree, 1, 9)
    check(model, tokens, grow_now(engine, grow_call(tokens, held, plan=WIDE)).tree)


def test_a_tree_starts_again_if_known_nodes_leave_it_no_rows(model: ResidentModel) -> None:
    engine, tokens, chains = engine_of(model, window=Window(300, 600, 24)), PROMPT[:9], StaticShape.chains(3, 8)
    num_known = []
    for plan in (WIDE, TreePlan(chains)):
        tree = grow_now(engine, grow_call(tokens, plan=plan)).tree
        check(model, tokens, tree)
        num_known.append(len(engine.pool._sessions[ScopedId("s")].explored))
    assert num_known == [13, chains.max_expansions], "without those that only the first tree needed"
    tokens = after(tokens, tree, 2, inside(tree, 2))
    check(model, tokens, grow_now(engine, grow_call(tokens, plan=WIDE)).tree)


def test_sessions_in_one_batch_have_separate_states(model: ResidentModel) -> None:
    engine = engine_of(model)
    texts = {"a": PROMPT[:5], "b": PROMPT[3:40], "c": [9] * 12}
    plans, held = dict(zip(texts, (WIDE, DEEP, SHAPE), strict=True)), dict.fromkeys(texts, 0)
    for _ in range(2):
        futures = {
            name: started(engine, grow_call(text, held[name], plan=plans[name], session_id=name))
            for name, text in texts.items()
        }
        while engine.is_growing:
            engine.step()
        for name, future in futures.items():
            tree, held[name] = future.result(0).tree, future.result(0).held_length
            check(model, texts[name], tree)
            texts[name] = after(texts[name], tree, 2, 3)


def rows_run(engine: DraftEngine, monkeypatch: pytest.MonkeyPatch, tokens: list[int], held: int, name: str) -> int:
    """Rows of the first step of a call, whose tree is checked."""
    counts, model = list[int](), engine._draft._model
    run = model.logits
    with monkeypatch.context() as patch:
        patch.setattr(model, "logits", lambda batch: counts.append(batch.num_tokens) or run(batch))
        result = grow_now(engine, grow_call(tokens, held, session_id=name))
    check(model, tokens, result.tree)
    engine.pool.check_integrity()
    return counts[0]


def test_a_shortened_text_continues_from_a_snapshot(model: ResidentModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(model)
    tokens = [*PROMPT, 1]
    tree = grow_now(engine, grow_call(tokens)).tree
    longer = after(tokens, tree, 2, 9)
    grow_now(engine, grow_call(longer, 70))
    assert rows_run(engine, monkeypatch, [*PROMPT[:67], 2, 3], 67, "s") == 1 + 68 - 64
    assert rows_run(engine, monkeypatch, [*PROMPT[:20], 2, 3], 20, "s") == 1 + 21


def test_a_prefix_is_copied_if_another_session_has_its_states(
    model: ResidentModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second session with a prefix leaves the states from which the third continues."""
    engine = engine_of(model)
    assert rows_run(engine, monkeypatch, [*PROMPT, 1], 0, "a") == 71
    assert rows_run(engine, monkeypatch, [*PROMPT[:40], *[4] * 50], 0, "b") == 90
    assert rows_run(engine, monkeypatch, [*PROMPT[:35], *[6] * 30], 0, "c") == 65 - 32
    assert rows_run(engine, monkeypatch, [*PROMPT, 7], 0, "b") == 71 - 64


def test_a_session_without_room_for_its_states_is_evicted_and_rebuilt(model: ResidentModel) -> None:
    engine, tokens = engine_of(model, most_slots=2), [*PROMPT, 1]
    for name in ("a", "b", "c", "a"):
        check(model, tokens, grow_now(engine, grow_call(tokens, session_id=name)).tree)
        engine.pool.check_integrity()
    assert len(engine.pool) == 2
    assert engine.pool.num_bytes == 4000 * engine.pool._arena.row_bytes + 2 * engine.pool._state_bytes
    waits = [started(engine, grow_call([3, n], session_id=name)) for n, name in enumerate("xyz")]
    assert len(engine.pool) == 2, "the third waits for a place"
    while engine.is_growing:
        engine.step()
    for n, future in enumerate(waits):
        check(model, [3, n], future.result(0).tree)


def test_an_evicted_session_has_no_states_while_others_grow(
    model: ResidentModel,
) -> None:
    engine = engine_of(model, most_slots=1, ahead_steps=9)
    grow_now(engine, grow_call(PROMPT[:9], session_id="a"))
    slot = engine.pool._sessions[ScopedId("a")].slot
    assert isinstance(slot, KVSlot)
    assert slot.states is not None
    assert engine.can_go_ahead
    started(engine, grow_call(PROMPT[:5], session_id="b"))
    assert len(engine.pool) == 1
    assert not slot.states
    while engine.is_growing or engine.can_go_ahead:
        engine.step()


def test_a_text_longer_than_the_drafts_window_starts_again(model: ResidentModel) -> None:
    engine, tokens = engine_of(model, window=Window(40, 600, GROWN_ROWS)), PROMPT[:38]
    for _ in range(3):
        tree = grow_now(engine, grow_call(tokens)).tree
        start = engine.pool._sessions[ScopedId("s")].start
        check(model, tokens, tree, start=start)
        tokens = after(tokens, tree, 2, 5)
    assert start > 0


@pytest.mark.parametrize(("num_steps_before", "num_calls"), [(0, 0), (0, 1), (1, 0), (2, 1)])
def test_a_session_continues_after_a_failed_step(
    model: ResidentModel, monkeypatch: pytest.MonkeyPatch, num_steps_before: int, num_calls: int
) -> None:
    """At its text, at accepted paths or below, while another session grows, which the failure does not affect."""
    engine = engine_of(model)
    tree = grow_now(engine, grow_call(PROMPT[:40], plan=DEEP)).tree
    tokens, run, left = after(PROMPT[:40], tree, 1, inside(tree, 1)), backend_of(CPU).recur, [num_calls]

    def breaks(*arguments: Any) -> torch.Tensor:
        out = run(*arguments)
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("no memory")
        return out

    futures = [started(engine, grow_call(tokens, 39, plan=DEEP)), started(engine, grow_call([3, 1], session_id="b"))]
    for _ in range(num_steps_before):
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(backend_of(CPU), "recur", breaks)
        left[0] = num_calls
        with pytest.raises(RuntimeError, match="no memory"):
            engine._draft.ask([running.job for running in engine._running.values()])
    while engine.is_growing:
        engine.step()
    check(model, [3, 1], futures[1].result(0).tree)
    if num_steps_before or num_calls:
        check(model, tokens, futures[0].result(0).tree)
    else:  # when states were on their way along the accepted path, above nodes that were known
        with pytest.raises(Unavailable, match="the draft's states were lost in a step that failed"):
            futures[0].result(0)
    check(model, tokens, grow_now(engine, grow_call(tokens, plan=WIDE)).tree)


def grown(draft: DraftWorker, tokens: list[int]) -> GrowResult:
    return draft.grow(grow_call(tokens, plan=TreePlan(StaticShape.chains(1, 6)))).result(20)


def test_a_draft_worker_counts_states_and_guesses_the_models_continuation(hybrid: Path, model: ResidentModel) -> None:
    """As its own target, greedy: all guesses are accepted."""
    shape = model.skeleton.kv_shape()
    assert shape.states is not None
    longest = (256 + GROWN_ROWS) * shape.row_bytes
    flags = ["--model", str(hybrid), "--dtype", "float32", "--threads", "1", "--max-context", "256"]
    config = parse(DraftConfig, "d", [*flags, "--max-nodes", "2000"], {})
    needs = draft_needs(config)
    assert needs.session == longest + shape.states.session_bytes(GROWN_ROWS)
    assert needs.step == shape.states.step_bytes(GROWN_ROWS)
    draft = DraftWorker(replace(config, kv_memory=longest + 3 * shape.growing_bytes), "test")
    try:
        info = draft.info()
        assert (info.max_context, info.max_sessions) == (256, 1)
        assert info.max_nodes == draft.max_nodes == GROWN_ROWS, "a larger shape would be refused"
        assert info.kv_bytes == pytest.approx(longest + 3 * shape.growing_bytes, abs=shape.row_bytes)
        tree = grown(draft, PROMPT[:30]).tree
    finally:
        draft.close()
    path = tree.tokens.tolist()
    assert decoded(model, PROMPT[:29], path[:-1]).argmax(1).tolist() == path[1:]


def test_memory_for_no_session_is_refused(hybrid: Path, model: ResidentModel) -> None:
    shape = model.skeleton.kv_shape()
    least = (GROWN_ROWS + 1) * shape.row_bytes + shape.growing_bytes
    config = parse(DraftConfig, "d", ["--model", str(hybrid), "--dtype", "float32", "--kv-memory", str(least - 1)], {})
    with pytest.raises(ConfigError, match=f"--kv-memory: must be at least {least} bytes, for one session"):
        DraftWorker(config, "test")


def test_state_sizes_are_read_without_a_list_of_layers_and_required_if_missing(hybrid: Path, tmp_path: Path) -> None:
    """Without a list every n-th layer has attention, by default every fourth, as transformers has it."""
    fields = json.loads((hybrid / "config.json").read_text())
    assert fields.pop("layer_types").index("full_attention") == 2
    copy = shutil.copytree(hybrid, tmp_path / "copy")

    def needs(**changed: Any) -> DraftNeeds:
        (copy / "config.json").write_text(json.dumps({**fields, **changed}))
        return draft_needs(parse(DraftConfig, "d", ["--model", str(copy)], {}))

    assert needs(full_attention_interval=3) == draft_needs(parse(DraftConfig, "d", ["--model", str(hybrid)], {}))
    assert needs() == needs(full_attention_interval=4) != needs(full_attention_interval=2)
    for wrong in ("x", [4], 0, None):
        with pytest.raises(CheckpointError, match=r"config.json: full_attention_interval must be 1 or more, got "):
            needs(full_attention_interval=wrong)
    with pytest.raises(CheckpointError, match=r"config.json: layer_types must be a list, got 5"):
        needs(layer_types=5)
    del fields["linear_key_head_dim"]
    with pytest.raises(
        CheckpointError, match=r"must give the sizes of its recurrent layers, got .*linear_key_head_dim"
    ):
        needs(full_attention_interval=3)


def test_a_draft_without_attention_is_refused(hybrid: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--drop-layers: must leave a layer with attention"):
        draft_skeleton(Checkpoint.open(hybrid), (2,), "bfloat16", CPU)
