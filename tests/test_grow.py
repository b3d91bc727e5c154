"""Growth with a fake draft: best-first against brute force, limits, ends, and sessions that are rolled back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bough.errors import PrefixMissing
from bough.growth import BestFirst, TreePlan
from bough.messages import Context, GrowCall
from bough.model.batch import Batch
from bough.model.kv import KVShape, KVSlot
from bough.sampling import SamplingParams
from draft_worker.grow import Children, Growth, grow_best_first
from draft_worker.session import DraftSession

VOCAB = 6
ROOT = 0


def fake_log_probs(path: Sequence[int]) -> np.ndarray:
    """(VOCAB,) log-probabilities that depend on the whole path."""
    logits = np.random.default_rng([len(path), *path]).normal(size=VOCAB) * 2
    return (logits - np.log(np.exp(logits).sum())).astype(np.float32)


def expand(growth: Growth, nodes: Sequence[int]) -> Children:
    """What a draft model would say, from `fake_log_probs`."""
    rows = []
    for node in nodes:
        path = []
        while node >= 0:
            path.append(int(growth.tokens[node]))
            node = int(growth.parents[node])
        rows.append(fake_log_probs(path[::-1]))
    order = np.argsort(-np.stack(rows), axis=1)
    return Children(order.astype(np.int32), np.take_along_axis(np.stack(rows), order, 1))


@given(st.integers(1, 40), st.integers(1, 4))
def test_with_width_to_spare_the_best_paths_of_all_are_found(budget: int, depth: int) -> None:
    """Brute force over every path up to `depth`; a wide frontier leaves nothing to luck."""
    tree = grow_best_first(ROOT, BestFirst(budget, width=10_000, depth=depth), frozenset(), expand)
    scores = [0.0]
    for length in range(1, depth + 1):
        for path in itertools.product(range(VOCAB), repeat=length):
            scores.append(sum(float(fake_log_probs((ROOT, *path[:i]))[path[i]]) for i in range(length)))
    best = sorted(scores, reverse=True)[:budget]
    tree.validate(VOCAB, budget)
    assert sorted(tree.scores().tolist(), reverse=True) == pytest.approx(best, abs=1e-4)


@given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 6))
def test_limits_hold_and_siblings_are_best_first(budget: int, width: int, depth: int) -> None:
    widths: list[int] = []

    def counting(growth: Growth, nodes: Sequence[int]) -> Children:
        widths.append(len(nodes))
        return expand(growth, nodes)

    tree = grow_best_first(ROOT, BestFirst(budget, width, depth), frozenset(), counting)
    tree.validate(VOCAB, budget)
    assert len(tree) <= budget
    assert tree.depths().max() <= depth
    assert len(widths) <= depth
    assert max(widths, default=0) <= width
    for children in tree.children():
        log_probs = [float(tree.log_probs[node]) for node in sorted(children.values())]
        assert log_probs == sorted(log_probs, reverse=True)


def test_nothing_grows_below_the_end_of_the_text() -> None:
    tree = grow_best_first(ROOT, BestFirst(40, 40, 4), frozenset({1, 2}), expand)
    assert any(token in (1, 2) for token in tree.tokens[1:])
    assert all(int(tree.tokens[parent]) not in (1, 2) for parent in tree.parents[1:])


class FakeModel:
    """A draft whose logits are a function of the path that the KV slot spells; a key is its token and position."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.rows_run: list[int] = []

    def logits(self, batch: Batch) -> torch.Tensor:
        self.rows_run.append(batch.num_tokens)
        rows = []
        for segment in batch.segments:
            keys = segment.slot.keys
            for i in range(len(segment)):
                keys[0, segment.rows[i], 0, 0] = float(segment.tokens[i])
            for i in range(len(segment) if segment.wants_logits else 0):
                before = [int(keys[0, row, 0, 0]) for row in range(segment.base)]
                depth = int(segment.positions[i]) - segment.base
                path = [int(keys[0, row, 0, 0]) for row in segment.tail[i, : depth + 1]]
                rows.append(fake_log_probs([*before, *path]))
        return torch.from_numpy(np.stack(rows))


def new_session() -> DraftSession:
    return DraftSession(KVSlot(KVShape(1, 1, 1, torch.float32), 200, torch.device("cpu")))


def grow_call(tokens: list[int], held: int, sampling: SamplingParams | None = None) -> GrowCall:
    context = Context.of("s", tokens, held, prompt_length=3)
    return GrowCall(context, tokens[-1], sampling or SamplingParams(temperature=0.0), 0, TreePlan(BestFirst(12, 3, 4)))


def test_a_session_kept_over_rounds_grows_what_a_fresh_one_would() -> None:
    """Follows an accepted path, then a token outside the tree, then a rollback by the orchestrator."""
    session, model = new_session(), FakeModel()
    tokens = [3, 1, 4]
    tree, _ = session.grow(grow_call(tokens, 0), model, branch=4)
    for take in (2, 1, 0, 3):
        nodes = tree.path(int(np.argmax(tree.depths())))[1 : 1 + take]
        held = len(tokens) - 1
        tokens = [*tokens, *(int(tree.tokens[node]) for node in nodes), 5]
        model.rows_run.clear()
        tree, _ = session.grow(grow_call(tokens, held), model, branch=4)
        fresh, _ = new_session().grow(grow_call(tokens, 0), FakeModel(), branch=4)
        assert tree == fresh
        assert model.rows_run[0] <= 3, "what was grown and accepted is not run again"
    tokens = [*tokens[:4], 2]
    tree, _ = session.grow(grow_call(tokens, 2), model, branch=4)
    fresh, _ = new_session().grow(grow_call(tokens, 0), FakeModel(), branch=4)
    assert tree == fresh


def test_a_wrong_belief_about_what_is_held_is_refused_with_the_truth() -> None:
    session = new_session()
    session.grow(grow_call([3, 1, 4], 0), FakeModel(), branch=4)
    with pytest.raises(PrefixMissing) as caught:
        session.grow(grow_call([3, 1, 4, 1, 5, 2], 5), FakeModel(), branch=4)
    assert caught.value.held_length == 2
    with pytest.raises(PrefixMissing):
        session.grow(grow_call([3, 2, 4], 2), FakeModel(), branch=4)


def test_at_temperature_the_draft_guesses_the_sample_itself() -> None:
    """The draft's own model as the target: its first guess is the token that the target will draw."""
    from bough.model.draw import draw

    hits = 0
    for seed in range(40):
        params = SamplingParams(temperature=0.9, seed=seed)
        tokens = [3, 1, 4]
        tree, _ = new_session().grow(grow_call(tokens, 0, params), FakeModel(), branch=4)
        logits = fake_log_probs(tokens).astype(np.float64)
        hits += int(tree.tokens[1]) == draw(logits, params, position=3)
    assert hits == 40
