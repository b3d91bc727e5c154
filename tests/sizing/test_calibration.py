"""What a draft's probabilities are worth: learnt from verdicts, and told to whoever asks."""

from __future__ import annotations

import re

import numpy as np
import pytest

from bough.cli.doctor import doctor
from bough.cli.main import argument_parser
from bough.client import Client
from bough.processes.launch import Cluster
from bough.protocol.generation import Finished, GenerateOptions, Speculation, TokenPrompt
from bough.trees.tree import Tree
from loadtest.calibration import Calibration

#   0
#   1  2       tokens 10, 11
#   3          token 12, below 1
TREE = Tree.of([5, 10, 11, 12], [-1, 0, 0, 1], [0.0, -0.1, -2.5, -1.0])


def random_tree(rng: np.random.Generator) -> Tree:
    """Two children at every node of the first three levels, of random probabilities that sum to at most 1."""
    parents, log_probs = [-1], [0.0]
    for parent in range(7):
        best = rng.uniform(0.3, 0.9)
        parents += [parent, parent]
        log_probs += np.log([best, (1 - best) * rng.uniform(0.3, 0.9)]).tolist()
    return Tree.of(list(range(len(parents))), parents, log_probs)


def verdict(tree: Tree, rng: np.random.Generator, trust: float) -> list[int]:
    """Accepted nodes, where guesses are right `trust` times as often as the draft says."""
    accepted, node = [], 0
    while children := [child for child in range(1, len(tree)) if tree.parents[child] == node]:
        probs = trust * np.exp(tree.log_probs[children].astype(float))
        choice = int(rng.choice(len(children) + 1, p=[*probs, 1 - probs.sum()]))
        if choice == len(children):
            break
        node = children[choice]
        accepted.append(node)
    return accepted


@pytest.mark.parametrize("trust", [0.5, 1.0])
def test_it_learns_what_an_overconfident_draft_is_worth(trust: float) -> None:
    rng, calibration = np.random.default_rng(1), Calibration()
    for _ in range(2000):
        tree = random_tree(rng)
        calibration.observe(tree, verdict(tree, rng, trust))
    trees = [random_tree(rng) for _ in range(3000)]
    realised = np.mean([len(verdict(tree, rng, trust)) + 1 for tree in trees])
    expected = np.mean([calibration.expected_tokens(tree) for tree in trees])
    assert expected == pytest.approx(realised, rel=0.04)
    unlearnt = np.mean([Calibration().expected_tokens(tree) for tree in trees])
    assert unlearnt == pytest.approx(realised, rel=0.1) if trust == 1.0 else unlearnt > 1.4 * realised


def test_old_rounds_are_forgotten() -> None:
    forgets, remembers = Calibration(half_life_rounds=20), Calibration()
    for calibration in (forgets, remembers):
        for accepted in [[1, 3]] * 300 + [[]] * 300:
            calibration.observe(TREE, accepted)
    assert forgets.acceptance(TREE)[1] < 0.15  # the prior is worth four guesses
    assert remembers.acceptance(TREE)[1] == pytest.approx(0.5, abs=0.02)


def confident_where_right(rng: np.random.Generator) -> tuple[Tree, list[int]]:
    """A chain of four guesses, each likelier where the one before was right; and its verdict."""
    parents, log_probs, accepted, right = [-1, 0], [0.0, np.log(0.5)], [], True
    for node in range(1, 5):
        right = bool(rng.random() < np.exp(log_probs[node]))
        if right and len(accepted) == node - 1:
            accepted.append(node)
        if node < 4:
            parents.append(node)
            log_probs.append(np.log(rng.uniform(0.5, 1.0) if right else rng.uniform(0.2, 0.7)))
    return Tree.of(list(range(5)), parents, log_probs), accepted


def test_what_stands_below_a_guess_says_something_about_it() -> None:
    rng, calibration = np.random.default_rng(1), Calibration()
    for _ in range(4000):
        calibration.observe(*confident_where_right(rng))
    trees, verdicts = zip(*[confident_where_right(rng) for _ in range(4000)], strict=True)
    realised = np.mean([len(accepted) + 1 for accepted in verdicts])
    assert np.mean([calibration.expected_tokens(tree) for tree in trees]) == pytest.approx(realised, rel=0.04)
    # The draft's probabilities are what they say; only, their product along a path is too little.
    products = [1 + np.exp(np.cumsum(tree.log_probs[1:])).sum() for tree in trees]
    assert np.mean(products) < 0.92 * realised
    for tree in trees:
        probs = calibration.acceptance(tree)
        assert probs[0] == 1.0
        assert (probs[1:] <= probs[tree.parents[1:]]).all()


def test_a_lift_of_rounds_long_forgotten_is_none() -> None:
    calibration = Calibration(half_life_rounds=50)
    calibration._right = calibration._below_right = calibration._below_expected = 5e-324
    assert calibration._lift() == 1.0


def test_a_draft_that_gets_worse_is_not_counted_as_worse_twice() -> None:
    """While its rates are being learnt anew, expectations come down to what is realised, and not below."""
    rng, calibration = np.random.default_rng(1), Calibration(half_life_rounds=100)
    for _ in range(500):
        tree = random_tree(rng)
        calibration.observe(tree, verdict(tree, rng, 1.0))
    trees = [random_tree(rng) for _ in range(1000)]
    realised = np.mean([len(verdict(tree, rng, 0.5)) + 1 for tree in trees])
    for _ in range(6):
        for _ in range(100):
            tree = random_tree(rng)
            calibration.observe(tree, verdict(tree, rng, 0.5))
        assert np.mean([calibration.expected_tokens(tree) for tree in trees]) > 0.97 * realised


def test_guesses_below_a_bonus_token_were_never_tried() -> None:
    """A node that did not fit into the verified tree can be right all the same; of its children nothing is known."""
    calibration = Calibration()
    before = calibration.acceptance(TREE)
    for _ in range(200):
        calibration.observe(TREE, [], bonus_node=1)
    after = calibration.acceptance(TREE)
    assert after[1] > 0.97
    assert after[2] < 0.01
    assert after[3] / after[1] == pytest.approx(before[3] / before[1], rel=0.02)


async def test_a_running_system_tells(tiny_cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """What expectations are worth on a random model of four layers is another matter: they are there, and move."""
    options = GenerateOptions(max_tokens=40, temperature=0.0, ignore_eos=True, speculation=Speculation(lookup=0))
    async with Client(tiny_cluster.address) as client:
        before = {one.draft_id: one.num_rounds for one in await client.calibrations()}
        events = [event async for event in client.generate(TokenPrompt((40, 41, 42)), options)]
        (report,) = await client.calibrations()
    finished = events[-1]
    assert isinstance(finished, Finished)
    # A draft that is seldom right is asked only now and then.
    num_rounds = report.num_rounds - before.get(report.draft_id, 0)
    assert 1 <= num_rounds <= finished.speculation.num_rounds
    assert 1.0 <= report.realised_tokens < 40
    assert 1.0 < report.expected_tokens < 32
    assert await doctor(argument_parser().parse_args(["doctor", "--address", tiny_cluster.address])) == 0
    told = r"tokens a round of [0-9.]+ s, where [0-9.]+ tokens and [0-9.]+ s were expected"
    assert re.search(told, capsys.readouterr().out)
