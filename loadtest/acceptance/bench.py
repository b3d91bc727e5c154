"""Continues several prompts in step with a draft and a target, for `loadtest.acceptance`."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bough.model.batch.batch import Batch, Segment
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.kv.session_kv import KVSlot
from bough.model.loading.loading import build_skeleton
from bough.model.running.runner import ResidentModel
from bough.model.sampling.sampler import Row
from bough.protocol.ids import ScopedId
from bough.protocol.messages import Context, GrowCall, Verdict, VerifyCall
from bough.protocol.prefix_hash import prefix_hash
from bough.protocol.sampling_params import SamplingParams
from bough.trees.scheme_acceptance import SchemeAcceptance
from bough.trees.tree import Tree
from bough.trees.tree_plan import Guess, Scheme, StaticShape, TreePlan
from draft_worker.worker import DraftWorker
from orchestrator.sizing.totals import AcceptanceCounter
from target_worker.verification.verdict import compute_verdict

REMEMBERED = 3000  # cached rows of logits: with scheme `target` all trees are verified along the same text
CPU = torch.device("cpu")


class Question(NamedTuple):
    """A request of a verifier for the logits after some tokens."""

    session: ScopedId
    tokens: list[int]
    answer: Future[Row]


class LazyTarget:
    """Verifies trees of many sessions in step, with one forward pass for the next token of all of them."""

    def __init__(self, folder: Path, max_context: int) -> None:
        self._model = ResidentModel(build_skeleton(Checkpoint.open(folder), torch.bfloat16), CPU)
        self._max_context = max_context
        self._slots: dict[ScopedId, KVSlot] = {}
        self._remembered: OrderedDict[int, NDArray[np.float32]] = OrderedDict()  # by hash of the preceding tokens

    def verify(self, calls: Sequence[VerifyCall]) -> list[Verdict]:
        """Verify like the target worker's engine; each call's `context` must hold all tokens before its root."""
        questions: SimpleQueue[Question | None] = SimpleQueue()
        with ThreadPoolExecutor(len(calls)) as judges:
            verdicts = [judges.submit(_judge, call, questions) for call in calls]
            num_judging = len(calls)
            while num_judging:  # each verifier asks one more question or ends
                asked = [question for question in (questions.get() for _ in range(num_judging)) if question]
                self._answer(asked)
                num_judging = len(asked)
        return [verdict.result() for verdict in verdicts]

    def _answer(self, questions: Sequence[Question]) -> None:
        names = [prefix_hash(question.tokens) for question in questions]
        new = [index for index, name in enumerate(names) if name not in self._remembered]
        if new:
            segments = [segment for index in new for segment in self._segments(questions[index])]
            logits = self._model.logits(Batch(segments, None, CPU)).float().numpy().copy()
            for index, row in zip(new, logits, strict=True):
                self._slot(questions[index].session).tokens[:] = questions[index].tokens
                self._remembered[names[index]] = row
        for name, question in zip(names, questions, strict=True):
            self._remembered.move_to_end(name)
            question.answer.set_result(self._remembered[name].astype(np.float64))
        while len(self._remembered) > REMEMBERED:
            self._remembered.popitem(last=False)

    def _segments(self, question: Question) -> list[Segment]:
        """Segments of the tokens that the session's slot lacks, with logits after the last one only."""
        slot, tokens = self._slot(question.session), question.tokens
        same = int(np.argmin([*(a == b for a, b in zip(slot.tokens, tokens, strict=False)), False]))
        same = min(same, len(tokens) - 1)
        slot.roll_back(same)
        new, positions = np.asarray(tokens[same:], np.int32), np.arange(same, len(tokens), dtype=np.int32)
        tail = np.zeros((len(new), 0), np.int32)
        parts = ((slice(None, -1), False), (slice(-1, None), True))
        return [
            Segment(slot, new[part], positions[part], positions[part], len(tokens), tail[part], has_logits)
            for part, has_logits in parts
        ]

    def _slot(self, session: ScopedId) -> KVSlot:
        if session not in self._slots:
            self._slots[session] = KVSlot(self._model.skeleton.kv_shape(), self._max_context, CPU)
        return self._slots[session]


def _judge(call: VerifyCall, questions: SimpleQueue[Question | None]) -> Verdict:
    tokens = [*call.context.tokens]

    def logits_after(path: Sequence[int]) -> Row:
        along = [*tokens, *(int(call.tree.tokens[node]) for node in path)]
        question = Question(call.context.session_id, along, Future())
        questions.put(question)
        return question.answer.result()

    try:
        return compute_verdict(call, tokens, logits_after)
    finally:
        questions.put(None)


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
        plan = TreePlan(StaticShape((0,) * RANKS), scheme, guess)  # a root and RANKS children
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
            self._draft.release(ScopedId(stream.name)).result()

    @contextmanager
    def _streams(self, params: SamplingParams, repeat: int) -> Iterator[list[Stream]]:
        streams = []
        for index, prompt in enumerate(self._prompts):
            seed = params.seed * MAX_STREAMS + repeat * len(self._prompts) + index
            streams.append(Stream(f"prompt-{index}", [*prompt], len(prompt), replace(params, seed=seed)))
        yield streams
        self.release(streams)


def _context(stream: Stream, held: int) -> Context:
    return Context.of(ScopedId(stream.name), stream.tokens, held, stream.prompt_length)


def grow_call(stream: Stream, plan: TreePlan) -> GrowCall:
    """The Grow call of a stream's next round."""
    return GrowCall(_context(stream, stream.draft_held), stream.tokens[-1], stream.params, stream.rounds, plan)
