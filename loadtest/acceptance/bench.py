"""Continues several prompts in step with a draft and a target, for `loadtest.acceptance`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from bough.protocol.messages import Context, GrowCall, Verdict, VerifyCall
from bough.protocol.sampling_params import SamplingParams
from bough.trees.scheme_acceptance import SchemeAcceptance
from bough.trees.tree import Tree
from bough.trees.tree_plan import Growth, Guess, Scheme, StaticShape, TreePlan
from draft_worker.worker import DraftWorker
from loadtest.acceptance.target import LazyTarget
from orchestrator.sizing.acceptance_counts import AcceptanceCounter

RANKS = 32  # children, or draws, whose acceptance is measured; at most NUM_RANKS
MAX_STREAMS = 100_000  # most streams with seeds derived from one seed


@dataclass(slots=True)
class Stream:
    """A prompt being continued."""

    name: str
    tokens: list[int]
    prompt_length: int
    params: SamplingParams
    draft_held: int = 0
    rounds: int = 0

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_length


class Bench:
    """A draft, a target, and prompts that are continued in step.

    Every prompt has its own seed in every repeat: with a shared seed, results would vary as much as with few prompts.
    """

    ranks: Growth = StaticShape((0,) * RANKS)  # a root and RANKS children

    def __init__(self, draft: DraftWorker, target: LazyTarget, prompts: Sequence[list[int]], length: int) -> None:
        self._draft = draft
        self._target = target
        self._prompts = prompts
        self._length = length

    def run(self, plan: TreePlan, params: SamplingParams, num_repeats: int = 1) -> list[float]:
        """Run rounds until every prompt has its tokens, several times; returns each prompt's mean tokens per round."""
        lengths: list[list[int]] = [[] for _ in self._prompts]
        for repeat in range(num_repeats):
            with self._streams(params, repeat) as streams:
                while waiting := [index for index, stream in enumerate(streams) if stream.num_generated < self._length]:
                    verdicts = self.round([streams[index] for index in waiting], plan)
                    for index, (tree, verdict) in zip(waiting, verdicts, strict=True):
                        streams[index].tokens += verdict.tokens_of(tree)
                        lengths[index].append(len(verdict.accepted_nodes) + 1)
        return [float(np.mean(of_prompt)) for of_prompt in lengths]

    def acceptance(self, scheme: Scheme, guess: Guess, params: SamplingParams) -> SchemeAcceptance:
        """Measure acceptance by rank with trees of a root and its children, at every position of new texts."""
        counter = AcceptanceCounter(math.inf)
        plan = TreePlan(self.ranks, scheme, guess)
        with self._streams(params, 0) as streams:
            for _ in range(self._length):
                for stream, (tree, verdict) in zip(streams, self.round(streams, plan), strict=True):
                    counter.observe(plan.scheme, tree, verdict.accepted_nodes)
                    stream.tokens.append(verdict.tokens_of(tree)[0])
        (counts,) = counter.counts()
        return counts

    def round(self, streams: Sequence[Stream], plan: TreePlan) -> list[tuple[Tree, Verdict]]:
        """Grow a tree for each stream and get its verdict."""
        trees = self.grown(streams, plan)
        calls = [
            VerifyCall(_context(stream, 0), 1, stream.rounds, tree, stream.params, plan.scheme)
            for stream, tree in zip(streams, trees, strict=True)
        ]
        for stream in streams:
            stream.rounds += 1
        return [*zip(trees, self.verdicts(calls), strict=True)]

    def grown(self, streams: Sequence[Stream], plan: TreePlan) -> list[Tree]:
        """Grow a tree for each stream."""
        growing = [self._draft.grow(grow_call(stream, plan)) for stream in streams]
        for stream, grown in zip(streams, growing, strict=True):
            stream.draft_held = grown.result().held_length
        return [grown.result().tree for grown in growing]

    def verdicts(self, calls: Sequence[VerifyCall]) -> list[Verdict]:
        """Verdicts from the target worker's code."""
        return self._target.verify(calls)

    def release(self, streams: Sequence[Stream]) -> None:
        """Release the streams' sessions at the draft."""
        for stream in streams:
            self._draft.release(stream.name).result()

    @contextmanager
    def _streams(self, params: SamplingParams, repeat: int) -> Iterator[list[Stream]]:
        streams = []
        for index, prompt in enumerate(self._prompts):
            seed = params.seed * MAX_STREAMS + repeat * len(self._prompts) + index
            streams.append(Stream(f"prompt-{index}", [*prompt], len(prompt), replace(params, seed=seed)))
        yield streams
        self.release(streams)


def _context(stream: Stream, held: int) -> Context:
    return Context.of(stream.name, stream.tokens, held, stream.prompt_length)


def grow_call(stream: Stream, plan: TreePlan) -> GrowCall:
    """The Grow call of a stream's next round."""
    return GrowCall(_context(stream, stream.draft_held), stream.tokens[-1], stream.params, stream.rounds, plan)
