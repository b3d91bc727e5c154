"""Which expansion stands below which, for compiled code: each has a chain of those below it, the last one first.

Numbers in chains are one higher than expansions, so that 0 is none, and room that was never used is empty. Arrays are
of int32: `first[1 + i]` begins the chain below expansion i, `first[0]` that below nothing, which has the roots;
`following[i]` is what comes after expansion i in its chain, and `tokens[i]` its token.
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
    """Expansions from number `begin` on stand below these parents, each -1 or an expansion."""
    for i in range(len(parents)):
        following[begin + i] = first[1 + parents[i]]
        first[1 + parents[i]] = 1 + begin + i


@strict
def place(depths: Any, paths: Any, parents: Any, begin: Any) -> Any:
    """Puts down the depths and paths of expansions from number `begin` on; how many levels these reach down to.

    Parents are -1 or expansions with lower numbers. `paths` (rows, levels) takes the expansions from the root down,
    and 0 in places that are not used.
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
    """The expansions that tokens are below these parents, each -1 or an expansion; -1 where there is none."""
    for i in range(len(wanted)):
        found[i] = _child(first, following, tokens, parents[i], wanted[i])


@strict
def find_tree(first: Any, following: Any, tokens: Any, parents: Any, wanted: Any, found: Any) -> Any:
    """Those that a tree's nodes are, whose parents are nodes before them, or -1 of a root; -1 where there is none."""
    for node in range(len(wanted)):
        above = -1 if parents[node] < 0 else found[parents[node]]
        is_known = parents[node] < 0 or above >= 0
        found[node] = _child(first, following, tokens, above, wanted[node]) if is_known else -1
