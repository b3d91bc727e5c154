"""A draft's sessions: rows by need, the one used longest ago is evicted, and equal prefixes are computed once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.errors import ConfigError, Exhausted, PrefixMissing, Unavailable
from bough.protocol.ids import ScopedId
from bough.trees.tree_plan import MAX_EXPANSIONS
from draft_worker.engine.session import Window
from draft_worker.engine.session_pool import SPARE_ROWS
from tests.fakes.draft import FakeModel, grow_call, grow_now, grown_alone, new_engine, started, worker

TEXT = [n % 5 for n in range(90)]


def test_a_prefix_that_another_session_has_computed_is_not_computed_again() -> None:
    model = FakeModel()
    engine = new_engine(model)
    grow_now(engine, grow_call([*TEXT, 1], session_id="a"))
    model.rows_run.clear()
    call = grow_call([*TEXT[:70], 4, 4, 2], session_id="b")
    assert grow_now(engine, call).tree == grown_alone(call).tree
    assert model.rows_run[0] == 72 - 64 + 1, "what is beyond whole blocks, and the root"


def test_a_prefix_with_another_salt_is_computed_again() -> None:
    """The time that a draft takes would reveal to one tenant what another has asked."""
    model = FakeModel()
    engine = new_engine(model)
    for name, salt, num_run in (("a", "alice", 91), ("b", "bob", 91), ("c", "alice", 91 - 64)):
        model.rows_run.clear()
        call = grow_call([*TEXT, 1], session_id=name)
        grow_now(engine, replace(call, context=replace(call.context, cache_salt=salt)))
        assert model.rows_run[0] == num_run


def test_a_session_that_diverged_is_not_mistaken_for_its_earlier_text() -> None:
    engine = new_engine(FakeModel())
    grow_now(engine, grow_call([*TEXT, 1], session_id="a"))
    waiting = started(engine, grow_call([*TEXT[:40], *[3] * 50, 1], 40, session_id="a"))
    call = grow_call([*TEXT, 2], session_id="b")
    assert grow_now(engine, call).tree == grown_alone(call).tree
    assert waiting.result(0).tree == grown_alone(grow_call([*TEXT[:40], *[3] * 50, 1])).tree


def test_slots_grow_with_the_calls_that_need_them() -> None:
    """Every slot once had room for the longest context and the most that may be explored."""
    window = Window(3000, 3000)
    engine = new_engine(FakeModel(), num_rows=window.max_rows, window=window)
    for name in "abcdefg":
        grow_now(engine, grow_call([3, 1, 4], session_id=name))
    assert len(engine.pool) == 7
    assert engine.pool.used_bytes({ScopedId(name) for name in "abcdefg"}) < 7 * 8 * (SPARE_ROWS + 20)
    long = grow_call([3, 1, 4, 2] * 300, session_id="a")
    assert grow_now(engine, long).tree == grown_alone_in(window, long)
    assert engine.pool.used_bytes({ScopedId("a")}) > 8 * 1200
    with pytest.raises(PrefixMissing):
        grow_now(engine, grow_call([3, 1, 4, 1], 3, session_id="b"))
    engine.pool.check_integrity()


def grown_alone_in(window: Window, call):
    return grow_now(new_engine(FakeModel(), window=window), call).tree


steps = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 90), st.booleans(), st.booleans()), max_size=8)


@pytest.mark.slow
@settings(max_examples=15)
@given(steps)
def test_trees_do_not_depend_on_which_session_is_evicted(calls: list[tuple[int, int, bool, bool]]) -> None:
    """Room for three; texts that share beginnings; growing ahead in between. Keys are tokens: a wrong row shows."""
    engine = new_engine(FakeModel(), num_rows=Window(100, 200).max_rows, ahead_steps=3)
    for who, length, is_other, releases in calls:
        tokens = [
            *TEXT[: length // 2],
            *([2] * (length - length // 2) if is_other else TEXT[length // 2 : length]),
            who,
        ]
        call = grow_call(tokens, session_id=f"s{who}")
        assert grow_now(engine, call).tree == grown_alone(call).tree
        for _ in range(2):
            engine.step()
        if releases:
            engine.release(ScopedId(f"s{who}"))
        engine.pool.check_integrity()
    assert len(engine.pool) <= 5


def test_a_draining_draft_accepts_no_new_sessions(tiny: Path) -> None:
    with worker(tiny, "--dtype", "auto") as draft:
        known = draft.grow(grow_call([3, 1, 4], session_id="known"))
        known.result(20)
        draft.drain().result(5)
        with pytest.raises(Unavailable, match="draining: new sessions must go to another one"):
            draft.grow(grow_call([3, 1, 4], session_id="new")).result(20)
        assert len(draft.grow(grow_call([3, 1, 4, 1], 2, session_id="known")).result(20).tree) > 1
        draft.drain().result(20)
        info = draft.info()
        assert (info.num_waiting, info.kv_used_bytes) == (0, 0)
        assert info.kv_bytes > 0


def test_a_context_longer_than_the_memory_is_seen_in_part(tiny: Path) -> None:
    """As one longer than the model was made for: the target's context may be any."""
    with worker(tiny) as roomy:
        row_bytes = roomy.info().kv_bytes // roomy._engine.pool._arena.num_rows
    with worker(tiny, "--kv-memory", str((MAX_EXPANSIONS + 40) * row_bytes)) as draft:
        info = draft.info()
        assert (info.max_context, info.max_sessions) == (40, 1)
        assert "sees at most the last 40 tokens of a session, limited by --kv-memory" in info.notes
        assert len(draft.grow(grow_call([3, 1, 4] * 30)).result(20).tree) > 1


def test_a_device_without_memory_for_the_draft_is_named(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 9 GiB")

    monkeypatch.setattr("draft_worker.worker.with_weights", load)
    with (
        pytest.raises(ConfigError, match=r"--device: must have room .* tried to allocate 9 GiB; try another device"),
        worker(tiny),
    ):
        pass


def test_calls_beyond_the_queue_are_refused(tiny: Path) -> None:
    with worker(tiny, "--dtype", "auto", "--max-waiting", "1") as draft:
        text = np.random.default_rng(0).integers(0, 256, 400).tolist()
        first = draft.grow(grow_call(text, session_id="a"))
        with pytest.raises(Exhausted, match="1 calls are waiting already"):
            draft.grow(grow_call(text, session_id="b")).result(0)
        first.result(20)


def test_a_slot_always_has_rows_for_the_largest_tree() -> None:
    window = Window(100, 200)
    assert window.num_rows(1000, 10 * MAX_EXPANSIONS) == window.max_rows


def test_a_call_that_fits_does_not_wait_for_spare_rows() -> None:
    window = Window(1000, 2000)
    engine = new_engine(FakeModel(), num_rows=window.max_rows, window=window)
    for name, num_tokens in (("a", 900), ("b", 900), ("c", 100)):
        started(engine, grow_call([1] * num_tokens, session_id=name))
    assert len(engine.pool) == 3
    engine.pool.check_integrity()


def test_calls_to_a_stopped_draft_are_refused(tiny: Path) -> None:
    """Such a call once waited for its tree forever."""
    with worker(tiny) as draft:
        pass
    for late in (draft.grow(grow_call([3, 1, 4])), draft.release(ScopedId("a"))):
        with pytest.raises(Unavailable, match="shut down"):
            late.result(5)
