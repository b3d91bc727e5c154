"""Computes shared prefixes once: one call computes, the others skip a sweep and copy whole blocks.

A call waits in two cases. Either this sweep would not have answered it, and it gains at least as many tokens as it
would have computed; or, by predicted sweep times, all such calls together are answered no later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bough.protocol.prefix_hash import common_length, whole_blocks
from target_worker.scheduler.batching import Part, choose
from target_worker.scheduler.job import VerifyJob


class _Follower(NamedTuple):
    """A call that could wait for another's work."""

    job: VerifyJob
    leader: VerifyJob
    num_common: int  # common leading tokens, in whole blocks

    def gain(self, parts: dict[int, Part[VerifyJob]]) -> int:
        """Tokens that it can copy after a sweep of `parts`."""
        part = parts.get(id(self.leader))
        reached = self.leader.num_cached + (part.num_context if part is not None else self.leader.num_in_sweep)
        return max(0, whole_blocks(min(self.num_common, reached)) - self.job.num_cached)


def choose_shared(
    jobs: Sequence[VerifyJob],
    max_tokens: int,
    knee: float,
    min_tokens: int,
    sweep_seconds: Callable[[int], float],
    in_flight: Sequence[VerifyJob] = (),
    max_nodes: float = math.inf,
) -> list[Part[VerifyJob]]:
    """Choose the parts of one sweep; common prefixes of at least `min_tokens` tokens are computed once.

    `sweep_seconds` predicts the time of a sweep from its number of tokens. Nothing is chosen if all calls gain by
    waiting for those `in_flight`. At most `max_nodes` are nodes of trees.
    """
    alone = choose(jobs, max_tokens, knee, max_nodes)
    followers = _followers(jobs, min_tokens, in_flight)
    while followers:
        waiting = {id(follower.job) for follower in followers}
        parts = choose([job for job in jobs if id(job) not in waiting], max_tokens, knee, max_nodes)
        content = _content(followers, parts, alone, sweep_seconds)
        if len(content) == len(followers):
            return parts
        followers = content
    return alone


def _followers(jobs: Sequence[VerifyJob], min_tokens: int, in_flight: Sequence[VerifyJob]) -> list[_Follower]:
    """Calls that share a long prefix with one that is further ahead or came earlier."""
    leaders = [job for job in in_flight if job.num_remaining]
    followers = []
    for job in sorted((job for job in jobs if job.num_remaining), key=lambda job: -job.num_cached):
        tokens = job.text.array
        allowed = [leader for leader in leaders if leader.text.cache_salt == job.text.cache_salt]
        shared = [(whole_blocks(common_length(leader.text.array, tokens)), leader) for leader in allowed]
        num_common, leader = max(shared, key=lambda pair: pair[0], default=(0, job))
        if num_common - job.num_cached >= min_tokens:
            followers.append(_Follower(job, leader, num_common))
        else:
            leaders.append(job)
    return followers


def _content(
    followers: Sequence[_Follower],
    parts: Sequence[Part[VerifyJob]],
    alone: Sequence[Part[VerifyJob]],
    sweep_seconds: Callable[[int], float],
) -> list[_Follower]:
    """Followers whose answer is not delayed by skipping a sweep of `parts`; `alone` is the sweep without waiting."""
    computed, own = ({id(part.job): part for part in some} for some in (parts, alone))
    late, content = [], []
    for follower in followers:
        part, gain = own.get(id(follower.job)), follower.gain(computed)
        if part is not None and part.has_tree:
            late += [follower] if gain else []
        elif gain >= (part.num_context if part is not None else 1):
            content.append(follower)
    left = sum(f.job.num_remaining + f.job.num_nodes - f.gain(computed) for f in late)
    num_computed, num_alone = (sum(part.num_tokens for part in some) for some in (parts, alone))
    num_computed += sum({id(f.leader): f.leader.num_in_sweep for f in late}.values())  # they wait for these sweeps too
    if sweep_seconds(num_computed) + sweep_seconds(left) <= sweep_seconds(num_alone):
        content += late
    return content
