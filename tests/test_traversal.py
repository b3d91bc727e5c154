"""What the schemes are compared with is exact: texts by traversal verification have the target's law."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from bough.model.sample import without_replacement
from loadtest.scheme_rates import Pair
from loadtest.traversal import Drafted, drawn, token_by_token, traversal
from tests.chi_square import fit

NUM_TEXTS, LENGTH, VOCAB = 10_000, 3, 4
ALLOWED = 1e-9  # chance of a failure without a bug
SHAPES: dict[str, Any] = {"chain": (((),),), "tree": (((), ()), ((),))}  # a node is its children


class World:
    """Small tables of what a target and a draft say after a text; the draft never takes the last token."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        texts = [text for length in range(LENGTH) for text in np.ndindex((VOCAB,) * length)]
        self.target = {text: rng.dirichlet(np.ones(VOCAB)) for text in texts}
        self.draft = {text: rng.dirichlet(np.ones(VOCAB - 1)) for text in texts}

    def drafted(self, children: Any, rng: np.random.Generator, text: tuple[int, ...] = ()) -> Drafted:
        """A tree below a text."""
        pair = Pair(self.target[text], self.draft[text])
        if not children:
            return Drafted(pair, [])
        tokens = np.arange(VOCAB - 1, dtype=np.int32)
        sample = without_replacement(tokens, self.draft[text], len(children), VOCAB - 1, rng).tolist()
        below = [(token, self.drafted(each, rng, (*text, token))) for token, each in zip(sample, children, strict=True)]
        return Drafted(pair, below)

    def chance(self, text: tuple[int, ...]) -> float:
        """Of a text in plain decoding."""
        return float(np.prod([self.target[text[:place]][token] for place, token in enumerate(text)]))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", [token_by_token, traversal])
@pytest.mark.parametrize("seed", [1, 2])
def test_texts_have_the_targets_law(rule: Any, shape: str, seed: int) -> None:
    world, rng = World(seed), np.random.default_rng(seed)
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(NUM_TEXTS):
        text = rule(world.drafted(SHAPES[shape], rng), rng)
        while len(text) < LENGTH:
            text = (*text, drawn(world.target[text], rng))
        counts[text] += 1
    texts = list(np.ndindex((VOCAB,) * LENGTH))
    probs = np.array([world.chance(text) for text in texts])
    assert fit(np.array([counts[text] for text in texts]), probs) > ALLOWED


def test_whole_paths_accept_more_of_a_chain() -> None:
    world, rng = World(1), np.random.default_rng(1)
    chains = [world.drafted(SHAPES["chain"], rng) for _ in range(3000)]
    by_path, by_token = (np.mean([len(rule(chain, rng)) for chain in chains]) for rule in (traversal, token_by_token))
    assert by_path > by_token
