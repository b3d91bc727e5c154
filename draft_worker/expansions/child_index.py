"""Index of expansions by parent and token, for compiled code: a linked list of children, newest first.

Links are int32 expansion numbers plus 1, so that 0 ends a list and zeroed memory is empty: `first[1 + i]` begins the
list below expansion i, `first[0]` the list of roots; `following[i]` continues after expansion i; `tokens[i]` is its
token.
"""

from __future__ import annotations

from typing import Any

from bough.model.cpu.jit import strict


@strict
def _child(first: Any, following: Any, tokens: Any, parent: Any, token: Any) -> Any:
    number = first[1 + parent]
    while number > 0 and tokens[number - 1] != token:
        number = following[number - 1]
    return number - 1


@strict
def link(first: Any, following: Any, parents: Any, begin: Any) -> Any:
    """Link expansions from number `begin` on below these parents, each -1 or an expansion."""
    for i in range(len(parents)):
        following[begin + i] = first[1 + parents[i]]
        first[1 + parents[i]] = 1 + begin + i


@strict
def place(depths: Any, paths: Any, parents: Any, begin: Any) -> Any:
    """Store depths and paths of expansions from number `begin` on; returns the number of levels that they reach.

    Parents are -1 or expansions with lower numbers. `paths` (rows, levels) gets the expansions from the root down;
    unused places are 0.
    """
    num_levels = 0
    for i in range(len(parents)):
        number, parent = begin + i, parents[i]
        depth = 0 if parent < 0 else depths[parent] + 1
        depths[number] = depth
        for level in range(paths.shape[1]):
            paths[number, level] = paths[parent, level] if level < depth else 0
        paths[number, depth] = number
        num_levels = max(num_levels, depth + 1)
    return num_levels


@strict
def find(first: Any, following: Any, tokens: Any, parents: Any, wanted: Any, found: Any) -> Any:
    """Find the expansions of tokens below these parents, each -1 or an expansion; -1 if there is none."""
    for i in range(len(wanted)):
        found[i] = _child(first, following, tokens, parents[i], wanted[i])


@strict
def find_tree(first: Any, following: Any, tokens: Any, parents: Any, wanted: Any, found: Any) -> Any:
    """Find the expansions of a tree's nodes; each parent is an earlier node, or -1; -1 if there is none."""
    for node in range(len(wanted)):
        above = -1 if parents[node] < 0 else found[parents[node]]
        is_known = parents[node] < 0 or above >= 0
        found[node] = _child(first, following, tokens, above, wanted[node]) if is_known else -1
