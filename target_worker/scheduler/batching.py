"""What goes into a sweep. Sizes in, sizes out: knows no model, no slots and no clock.

A sweep has room for so many tokens. Trees go whole or wait; contexts go in pieces. Whoever is in the middle of an
answer comes before those who have just begun, but those keep a share, and nobody is passed over for long. Up to the
knee tokens cost nothing, as the link takes as long; beyond, whoever waits for an answer pays for another's prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar


class Waiting(Protocol):
    """A call that waits for a sweep."""

    @property
    def num_left(self) -> int:
        """Tokens of its context that are still to be computed."""
        ...

    @property
    def num_nodes(self) -> int:
        """Of its tree, which follows the context."""
        ...

    @property
    def num_passed_over(self) -> int:
        """Sweeps in a row that it had no part in."""
        ...


AnyWaiting = TypeVar("AnyWaiting", bound=Waiting)


class Part(NamedTuple, Generic[AnyWaiting]):
    """What of a call goes into one sweep."""

    job: AnyWaiting
    num_context: int
    has_tree: bool

    @property
    def num_tokens(self) -> int:
        """Rows of the sweep that it takes."""
        return self.num_context + (self.job.num_nodes if self.has_tree else 0)


def choose(jobs: Sequence[AnyWaiting], max_tokens: int, knee: float) -> list[Part[AnyWaiting]]:
    """Parts of one sweep, `max_tokens` together at most. Every tree must fit an empty sweep.

    Beside answers under way contexts fill the sweep up to the knee, or take as many tokens as those trees have: so
    past the knee prompts double the time of a sweep at most.

    With n calls waiting, a call has a part in the n-th sweep at the latest: whoever was passed over most often comes
    first, those before it were passed over as often, and each of them comes after it as soon as it had a part.
    """
    line = sorted(jobs, key=lambda job: -job.num_passed_over)  # and by arrival
    share = max(1, max_tokens // max(1, len(line)))
    reserved = sum(min(job.num_left, share) for job in line)
    parts, room = [], max_tokens
    for place, job in enumerate(line):
        if job.num_left == 0 and (job.num_nodes <= room - reserved or place == 0):
            parts.append(Part(job, 0, has_tree=True))
            room -= job.num_nodes
    contexts = [job for job in line if job.num_left]
    if parts and contexts:
        num_nodes = max_tokens - room
        room = int(min(room, max(knee - num_nodes, num_nodes)))
        share = min(share, max(1, room // len(contexts)))
    return parts + _contexts(contexts, room, share)


def _contexts(line: Sequence[AnyWaiting], room: int, share: int) -> list[Part[AnyWaiting]]:
    """Half a share for each, and the rest for those who are nearest to their answer: others would all wait for all."""
    sizes = []
    for job in line:
        sizes.append(min(job.num_left, max(1, share // 2), room))
        room -= sizes[-1]
    parts = {}
    for place in sorted(range(len(line)), key=lambda place: line[place].num_left):
        job = line[place]
        more = min(job.num_left - sizes[place], room)
        room -= more
        has_tree = sizes[place] + more == job.num_left and job.num_nodes <= room
        room -= job.num_nodes if has_tree else 0
        parts[place] = Part(job, sizes[place] + more, has_tree)
    return [part for _, part in sorted(parts.items()) if part.num_context]
