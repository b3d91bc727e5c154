"""Chooses what goes into a sweep, from sizes alone: this module knows no model, slots or clock.

A sweep has a limit of tokens, and one of nodes. Trees go whole or wait; contexts may be split. Sessions in the middle
of an answer come before new ones, which still get a share, and no call is skipped for long. Up to the knee tokens are
free, as the link is slower. Beyond it, a prompt delays the answers of other sessions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar


class Waiting(Protocol):
    """A call that waits for a sweep."""

    @property
    def num_remaining(self) -> int:
        """Tokens of the context still to be computed."""

    @property
    def num_nodes(self) -> int:
        """Nodes of the tree, which follows the context."""

    @property
    def num_sweeps_skipped(self) -> int:
        """Consecutive sweeps without a part of this call."""


AnyWaiting = TypeVar("AnyWaiting", bound=Waiting)


class Part(NamedTuple, Generic[AnyWaiting]):
    """A call's share of one sweep."""

    job: AnyWaiting
    num_context: int
    has_tree: bool

    @property
    def num_tokens(self) -> int:
        """Rows of the sweep that it takes."""
        return self.num_context + (self.job.num_nodes if self.has_tree else 0)


def choose(
    jobs: Sequence[AnyWaiting], max_tokens: int, knee: float, max_nodes: float = math.inf
) -> list[Part[AnyWaiting]]:
    """Choose the parts of one sweep, at most `max_tokens` in total, of which at most `max_nodes` are nodes of trees.

    Every tree must fit an empty sweep.

    Besides trees, contexts fill the sweep up to the knee, or take as many tokens as the trees have: so beyond the knee
    prompts at most double a sweep's time.

    With n calls waiting, each has a part in one of the next n sweeps: the one skipped most often comes first, and
    falls behind the others once it has had a part.
    """
    line = sorted(jobs, key=lambda job: -job.num_sweeps_skipped)  # stable: ties in order of arrival
    share = max(1, max_tokens // max(1, len(line)))
    reserved = sum(min(job.num_remaining, share) for job in line)
    parts, room = [], max_tokens
    for place, job in enumerate(line):
        left = max_nodes - (max_tokens - room)
        if job.num_remaining == 0 and (job.num_nodes <= min(room - reserved, left) or place == 0):
            parts.append(Part(job, 0, has_tree=True))
            room -= job.num_nodes
    contexts, max_nodes = [job for job in line if job.num_remaining], max_nodes - (max_tokens - room)
    if parts and contexts:
        num_nodes = max_tokens - room
        room = int(min(room, max(knee - num_nodes, num_nodes)))
        share = min(share, max(1, room // len(contexts)))
    return parts + _contexts(contexts, room, share, max_nodes)


def _contexts(line: Sequence[AnyWaiting], room: int, share: int, max_nodes: float) -> list[Part[AnyWaiting]]:
    """Give half a share to each, and the rest to the calls nearest to their answer: equal shares would delay all."""
    sizes = []
    for job in line:
        sizes.append(min(job.num_remaining, max(1, share // 2), room))
        room -= sizes[-1]
    parts = {}
    for place in sorted(range(len(line)), key=lambda place: line[place].num_remaining):
        job = line[place]
        more = min(job.num_remaining - sizes[place], room)
        room -= more
        has_tree = sizes[place] + more == job.num_remaining and job.num_nodes <= min(room, max_nodes)
        num_nodes = job.num_nodes if has_tree else 0
        room, max_nodes = room - num_nodes, max_nodes - num_nodes
        parts[place] = Part(job, sizes[place] + more, has_tree)
    return [part for _, part in sorted(parts.items()) if part.num_context]
