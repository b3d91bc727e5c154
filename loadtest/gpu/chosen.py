"""Sweeps the tree that is best for published acceptance on this machine; part of `python -m loadtest.gpu`.

The draft is not run: its guesses are accepted as those of Llama-3-70B-Instruct's 8B draft were (Sequoia, arXiv
2402.12374, appendix E), and each level of its tree takes the time that a step of its shape took. What is measured is
the sweep of the very tree that comes out best; seconds a token are reckoned from both.

That tree is the best of all shapes for these numbers (`optimal_tree.best_shape`): what a sizer that knew them could do
at most with one shape for all rounds. An orchestrator's own TreeSizer learns them from its rounds, and is not run here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bough.trees.acceptance import acceptance_from
from bough.trees.optimal_tree import best_shape, expected_tokens
from bough.trees.tree import Tree
from bough.trees.tree_plan import StaticShape

PUBLISHED = Path(__file__).parent.parent / "data" / "acceptance-published.json"
LEVELS = 24  # most levels of a tree, the orchestrator's default
LAYERS_OF_70B = 80
TO_BEAT = {  # published seconds per token of a 70B, by the bits of its weights
    16: {
        "Sequoia, 70B/8B, L40": 0.60,
        "Sequoia's best, L40": 0.56,
        "Sequoia, 70B, RTX 4090": 0.57,
        "SpecExec, 70B/8B, A100": 1 / 2.94,
    },
    4: {
        "UMbreLLa, 70B, L40, not offloaded": 1 / 38.5,
        "UMbreLLa, 70B, RTX 4090": 1 / 8.6,
        "UMbreLLa, 70B, RTX 4070 Ti": 1 / 6.1,
        "SpecExec, 70B/7B, RTX 4090": 1 / 5.66,
        "SpecExec, 70B/7B, A100": 1 / 6.17,
    },
}


def chosen(
    bits: int,
    num_layers: int,
    seconds_by_tokens: Mapping[int, float],
    step_seconds: float,
    sweep: Callable[[Tree], float],
) -> dict[str, Any]:
    """The best tree and its predicted seconds per token; `sweep` sweeps a tree and returns the seconds.

    Only a target with a 70B's `num_layers` is compared with published figures.
    """
    acceptance = acceptance_from(PUBLISHED.name, json.loads(PUBLISHED.read_text()))
    sizes = sorted(seconds_by_tokens)

    def seconds_of(shape: StaticShape) -> float:
        swept = float(np.interp(shape.budget, sizes, [seconds_by_tokens[size] for size in sizes]))
        return swept + max(shape.depths()) * step_seconds

    shapes = [best_shape(acceptance, nodes, levels) for nodes in sizes for levels in range(1, LEVELS + 1)]
    shape = max(shapes, key=lambda one: expected_tokens(one, acceptance) / seconds_of(one))
    tree = Tree.of([*range(shape.budget)], [-1, *shape.parents], [0.0] * shape.budget)
    tokens, draft_seconds = expected_tokens(shape, acceptance), max(shape.depths(), default=0) * step_seconds
    sweep_seconds = sweep(tree)
    seconds = (draft_seconds + sweep_seconds) / tokens
    compared = TO_BEAT[bits] if num_layers == LAYERS_OF_70B else {}
    return {
        "bits": bits,
        "layers": num_layers,
        "by": "best_shape over the published acceptance",
        "nodes": len(tree),
        "levels": max(shape.depths(), default=0),
        "tokens_a_round": round(tokens, 2),
        "draft_seconds": round(draft_seconds, 4),
        "sweep_seconds": round(sweep_seconds, 4),
        "seconds_a_token": round(seconds, 4),
        "plain_seconds_a_token": round(seconds_by_tokens[sizes[0]], 4),
        "times_as_fast_as": {name: round(theirs / seconds, 2) for name, theirs in compared.items()},
    }
