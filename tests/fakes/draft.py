"""A draft engine around a fake model, for tests of growing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import torch

from bough.config.processes import DraftConfig, parse
from bough.grammar.allowed_tokens import Grammars
from bough.model.batch.batch import Batch
from bough.model.kv.session_kv import KVArena, KVShape
from bough.protocol.ids import ScopedId
from bough.protocol.messages import Context, GrowCall, GrowResult
from bough.protocol.sampling_params import SamplingParams
from bough.tokenization.vocabulary import TokenizerFiles
from bough.trees.tree_plan import BestFirst, TreePlan
from draft_worker.candidates.candidates import TemperatureScalings
from draft_worker.engine.engine import DraftEngine, PendingGrow
from draft_worker.engine.session import Window
from draft_worker.engine.session_pool import SessionPool
from draft_worker.model.model_draft import ModelDraft
from draft_worker.worker import DraftWorker

VOCAB = 6
NO_GRAMMARS = Grammars(TokenizerFiles(b"", "", ()), VOCAB)  # a call with a grammar would be refused
PLAN = TreePlan(BestFirst(12, 3, 4))


def fake_log_probs(path: Sequence[int]) -> np.ndarray:
    """Log-probabilities (VOCAB,) of the next token; a function of the whole path."""
    return _log_probs(tuple(path))


@cache
def _log_probs(path: tuple[int, ...]) -> np.ndarray:
    logits = np.random.default_rng([len(path), *path]).normal(size=VOCAB) * 2
    return (logits - np.log(np.exp(logits).sum())).astype(np.float32)


class FakeModel:
    """A draft whose logits are a function of the tokens in the KV slot; it stores each token as its own key."""

    device = torch.device("cpu")

    def __init__(self, before_pass: Callable[[Batch], None] = lambda _: None) -> None:
        self.rows_run: list[int] = []
        self._before_pass = before_pass

    def logits(self, batch: Batch) -> torch.Tensor:
        self._before_pass(batch)
        self.rows_run.append(batch.num_tokens)
        rows = []
        for segment in batch.segments:
            held = segment.slot.keys[0, :, 0, 0].numpy()  # the token of each row
            held[segment.rows] = segment.tokens
            if segment.wants_logits:
                known = held.tolist()
                before = list(map(int, known[: segment.base]))
                for depth, tail in zip(segment.positions - segment.base, segment.tail.tolist(), strict=True):
                    rows.append(fake_log_probs([*before, *(int(known[row]) for row in tail[: depth + 1])]))
        return torch.from_numpy(np.stack(rows)) if rows else torch.zeros(0, VOCAB)


def new_engine(
    model: FakeModel,
    num_rows: int = 0,
    window: Window | None = None,
    ahead_steps: int = 0,
    power: float = 1.0,
    grammars: Grammars = NO_GRAMMARS,
) -> DraftEngine:
    """A draft engine, by default with windows of 100 tokens and 100 slots.

    `power` is the inverse temperature of the draft's probabilities; 0 lets the engine learn it.
    """
    window = window or Window(100, 200)
    shape, num_rows = KVShape(1, 1, 1, torch.float32), num_rows or 100 * window.max_rows
    arena = KVArena(shape, shape.empty(num_rows, model.device), rows_to_keep=lambda slot: slot.num_rows)
    return DraftEngine(
        ModelDraft(model, grammars),
        VOCAB,
        4,
        SessionPool(arena, window),
        ahead_steps,
        TemperatureScalings(power),
    )


def grow_call(
    tokens: list[int],
    held: int = 0,
    sampling: SamplingParams | None = None,
    plan: TreePlan = PLAN,
    session_id: str = "s",
    round_: int | None = None,
) -> GrowCall:
    """A call for a session whose tokens are `tokens`, the last being the tree's root.

    The engine is taken to hold the first `held` tokens. Sampling is greedy by default; the round is the number of
    committed tokens by default, as in the orchestrator.
    """
    context = Context.of(ScopedId(session_id), tokens, held, prompt_length=3)
    round_ = context.base_length if round_ is None else round_
    return GrowCall(context, tokens[-1], sampling or SamplingParams(temperature=0.0), round_, plan)


def started(engine: DraftEngine, call: GrowCall) -> Future[GrowResult]:
    future: Future[GrowResult] = Future()
    engine.start(PendingGrow(call, future, 0))
    return future


def grow_now(engine: DraftEngine, call: GrowCall) -> GrowResult:
    """Run draft steps until the call has its tree; raises the call's error."""
    future = started(engine, call)
    while engine.is_growing:
        engine.step()
    return future.result(0)


def grown_alone(call: GrowCall) -> GrowResult:
    """The result of a call on an engine of its own."""
    return grow_now(new_engine(FakeModel()), call)


@contextmanager
def worker(model: Path, *flags: str) -> Iterator[DraftWorker]:
    """A real draft worker of one thread."""
    config = parse(DraftConfig, "d", ["--model", str(model), "--dtype", "float32", "--threads", "1", *flags], {})
    draft = DraftWorker(config, "test")
    try:
        yield draft
    finally:
        draft.close()
