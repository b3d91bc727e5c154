"""Which guesses the target agrees with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bough.messages import Verdict
from bough.tree import Tree


def verify_by_target(tree: Tree, draw: Callable[[Sequence[int]], int]) -> Verdict:
    """Walks down while the target's own token is among the children (SpecExec, arXiv 2406.02532, algorithm 1).

    `draw` takes a path of nodes from the root and returns the token that the target puts after it. Exact for any tree:
    every token returned is drawn from the target after tokens that it drew itself.
    """
    children = tree.children()
    path = [0]
    token = draw(path)
    while token in children[path[-1]]:
        path.append(children[path[-1]][token])
        token = draw(path)
    return Verdict(tuple(path[1:]), token)
