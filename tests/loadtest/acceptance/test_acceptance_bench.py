"""What `loadtest.acceptance` tunes its contestants with, and which of them it runs."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import pytest

from bough.protocol.messages import GrowCall, GrowResult, Timings, Verdict, VerifyCall
from bough.protocol.sampling_params import SamplingParams
from bough.trees.acceptance import by_rank
from bough.trees.optimal_tree import best_chains
from bough.trees.tree_plan import Guess, Scheme, StaticShape
from loadtest.acceptance.__main__ import arguments_from, contestants_at, tokens_per_round
from loadtest.acceptance.multi_round import MultiRoundBench, merged, multi_round_law
from tests.fakes.two_tokens import TARGET_PROBS, B, Case, cases, num_cases, sample


class Scripted:
    """Draft and target of as many streams as there are cases, each of which meets its own."""

    def __init__(self, of_streams: Sequence[Case]) -> None:
        self._cases = {f"prompt-{index}": case for index, case in enumerate(of_streams)}
        self.growths = set[object]()

    def grow(self, call: GrowCall) -> Future[GrowResult]:
        self.growths.add(call.plan.growth)
        grown: Future[GrowResult] = Future()
        drawn = self._cases[call.context.session_id].drawn
        grown.set_result(GrowResult(sample(drawn[call.round]), 0, Timings()))
        return grown

    def verify(self, calls: Sequence[VerifyCall], _: object) -> list[Verdict]:
        assert all(call.tree == self._cases[call.context.session_id].tree for call in calls)
        return [self._cases[call.context.session_id].verdict for call in calls]

    def release(self, session_id: str) -> Future[None]:
        released: Future[None] = Future()
        released.set_result(None)
        return released


class OfCases(MultiRoundBench):
    """Of trees of two draws."""

    ranks = StaticShape.chains(2, 1)


def test_independent_chains_are_tuned_by_draws_not_by_the_children_these_come_to() -> None:
    """Two draws hold B 19 times in 100, but the second child is B nearly always: two chains looked like the best."""
    scripted = Scripted([case for case in cases(2) for _ in range(case.times)])
    bench = OfCases(scripted, scripted, [[0, 0]] * num_cases(2), length=1)
    vector = by_rank(bench.acceptance(Scheme.WITHOUT_REPLACEMENT, Guess.SAMPLE, SamplingParams()))
    assert scripted.growths == {StaticShape.chains(1, 1)}
    assert vector[0].tolist() == pytest.approx([0.6, 0.04])
    assert best_chains(vector, nodes=9, levels=9)[:2] == (1, 8)


def test_multi_round_verification_keeps_the_targets_law() -> None:
    of_b = sum(case.times for case in cases(3) if case.verdict.bonus_token == B) / num_cases(3)
    assert of_b == pytest.approx(TARGET_PROBS[B], abs=1e-6)
    tree = merged([sample(B), sample(B)])
    assert (tree.tokens.tolist(), tree.sampled_children(0, Scheme.WITHOUT_REPLACEMENT).tolist()) == ([0, B], [1, 1])
    assert multi_round_law(tree, 1, TARGET_PROBS).tolist() == TARGET_PROBS.tolist()


def test_the_line_of_figures_holds_means_and_half_widths() -> None:
    cells = [(0.6, "one", 8, 3.5, 0.25), (0.6, "one", 16, 4.0, 0.5), (1.0, "another", 8, 2.0, 0.125)]
    keys = ("temperature", "contestant", "nodes", "tokens_per_round", "interval")
    figures = tokens_per_round([dict(zip(keys, cell, strict=True)) for cell in cells])
    assert figures == {"0.6": {"one": {"8": [3.5, 0.25], "16": [4.0, 0.5]}}, "1.0": {"another": {"8": [2.0, 0.125]}}}


def test_contestants_run_alone_by_a_part_of_their_names() -> None:
    def names(*flags: str) -> list[list[str]]:
        arguments = arguments_from(flags)
        return [[*contestants_at(temperature, arguments.contestants)] for temperature in arguments.temperatures]

    assert [len(of_one) for of_one in names()] == [4, 6, 6]
    assert names("--contestants", "SpecInfer") == [[], *[["SpecInfer: multi-round, k chains"]] * 2]
    alone = names("--contestants", "greedy", "Sequoia", "--temperatures", "0", "1")
    assert alone == [["greedy k chains"], ["Sequoia: without replacement, optimal shape"]]


def test_contestants_that_nobody_is_are_refused_and_the_others_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments_from(["--contestants", "Sequoia", "Medusa"])
    error = capsys.readouterr().err
    assert "--contestants: must be part of a name at these temperatures (" in error
    assert "got 'Medusa'" in error
    assert "SpecExec: target, best-first; " in error
    with pytest.raises(SystemExit):
        arguments_from(["--contestants", "Sequoia", "--temperatures", "0"])
    error = capsys.readouterr().err
    assert "got 'Sequoia'" in error
    assert "Sequoia:" not in error
