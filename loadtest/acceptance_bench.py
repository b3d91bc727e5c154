"""Prompts that are continued in step by a draft and a target, for `loadtest.acceptance`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from bough.acceptance import DepthCounts, SchemeAcceptance
from bough.growth import Chains, Guess, Scheme, StaticShape, TreePlan
from bough.messages import Context, GrowCall, Verdict, VerifyCall
from bough.sampling import SamplingParams
from bough.tree import Tree
from draft_worker.worker import DraftWorker
from loadtest.acceptance_target import LazyTarget

RANKS = 32  # children whose acceptance is measured


@dataclass(slots=True)
class Stream:
    """A prompt being continued."""

    name: str
    tokens: list[int]
    prompt_length: int
    draft_held: int = 0
    rounds: int = 0

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_length


@dataclass(slots=True)
class Outcome:
    """Rounds of one contestant at one size and temperature."""

    per_prompt: list[float] = field(default_factory=list)  # tokens per round
    rounds: list[list[tuple[Tree, tuple[int, ...]]]] = field(default_factory=list)  # of each prompt: tree, accepted
    texts: list[list[int]] = field(default_factory=list)  # of each prompt, itself included

    @property
    def mean_of_rounds(self) -> float:
        """Tokens per round where every round weighs the same."""
        num_tokens = [len(accepted) + 1 for rounds in self.rounds for _, accepted in rounds]
        return float(np.mean(num_tokens))


class Bench:
    """A draft, a target, and prompts that are continued in step."""

    def __init__(self, draft: DraftWorker, target: LazyTarget, prompts: Sequence[list[int]], length: int) -> None:
        self._draft = draft
        self._target = target
        self._prompts = prompts
        self._length = length

    def run(self, plan: TreePlan, params: SamplingParams) -> Outcome:
        """Rounds until every prompt has its tokens."""
        outcome = Outcome(rounds=[[] for _ in self._prompts])
        with self._streams() as streams:
            while waiting := [index for index, stream in enumerate(streams) if stream.num_generated < self._length]:
                for index, (tree, verdict) in zip(
                    waiting, self._round([streams[i] for i in waiting], plan, params), strict=True
                ):
                    streams[index].tokens += verdict.tokens_of(tree)
                    outcome.rounds[index].append((tree, verdict.accepted_nodes))
            outcome.per_prompt = [stream.num_generated / stream.rounds for stream in streams]
            outcome.texts = [stream.tokens for stream in streams]
        return outcome

    def acceptance(
        self, scheme: Scheme, guess: Guess, params: SamplingParams, texts: Sequence[list[int]] | None = None
    ) -> SchemeAcceptance:
        """By rank, from trees of a root and its children only, at every position of texts: given ones, or their own."""
        accepted, rejected = np.zeros(RANKS), np.zeros(RANKS)
        growth = Chains(RANKS, 1) if scheme is Scheme.MULTI_ROUND else StaticShape((0,) * RANKS)
        plan = TreePlan(growth, scheme, guess)
        with self._streams() as streams:
            for _ in range(self._length):
                verdicts = self._round(streams, plan, params)
                for index, (stream, (tree, verdict)) in enumerate(zip(streams, verdicts, strict=True)):
                    if verdict.accepted_nodes:
                        accepted[verdict.accepted_nodes[0] - 1] += 1
                    else:
                        rejected[len(tree) - 2] += 1
                    # One token, so that every position is counted once.
                    known = texts[index] if texts else verdict.tokens_of(tree)
                    stream.tokens.append(known[len(stream.tokens) if texts else 0])
        counts = DepthCounts(tuple(accepted.tolist()), tuple(rejected.tolist()))
        return SchemeAcceptance(scheme, int(accepted.sum() + rejected.sum()), (counts,))

    def _round(self, streams: Sequence[Stream], plan: TreePlan, params: SamplingParams) -> list[tuple[Tree, Verdict]]:
        """A tree for each stream, and the verdict on it."""
        growing = [self._draft.grow(_grow_call(stream, plan, params)) for stream in streams]
        trees = [grown.result().tree for grown in growing]
        calls = [
            VerifyCall(_context(stream, 0), 1, stream.rounds, tree, params, plan.scheme)
            for stream, tree in zip(streams, trees, strict=True)
        ]
        for stream, grown in zip(streams, growing, strict=True):
            stream.draft_held = grown.result().held_length
            stream.rounds += 1
        return [*zip(trees, self._target.verify(calls), strict=True)]

    @contextmanager
    def _streams(self) -> Iterator[list[Stream]]:
        streams = [Stream(f"prompt-{index}", [*prompt], len(prompt)) for index, prompt in enumerate(self._prompts)]
        yield streams
        for stream in streams:
            self._draft.release(stream.name).result()


def _context(stream: Stream, held: int) -> Context:
    return Context.of(stream.name, stream.tokens, held, stream.prompt_length)


def _grow_call(stream: Stream, plan: TreePlan, params: SamplingParams) -> GrowCall:
    return GrowCall(_context(stream, stream.draft_held), stream.tokens[-1], params, stream.rounds, plan)
