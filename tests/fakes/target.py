"""A sweep engine around a fake model, for tests of slots, sweeps and sessions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from bough.grammar.allowed_tokens import Grammars
from bough.model.batch.batch import Batch
from bough.model.kv.session_kv import KVArena, KVShape, KVSlot
from bough.model.sizes.target_limits import TargetLimits
from bough.protocol.ids import ScopedId
from bough.protocol.messages import Context, Timings, VerifyCall
from bough.protocol.sampling_params import SamplingParams
from bough.sizing.row_counts import RowCounts
from bough.sizing.sweep_times import SweepTimes
from bough.tokenization.vocabulary import TokenizerFiles
from bough.trees.tree import Tree
from target_worker.kv.slot_pool import SlotPool
from target_worker.scheduler.engine import SweepEngine
from target_worker.sweep.streamed_model import StreamedSweeper
from tests.fakes.waiting import block_until

VOCAB = 50
NO_GRAMMARS = Grammars(TokenizerFiles(b"", "", ()), VOCAB)  # a call with a grammar would be refused
CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)
SHAPE = KVShape(1, 1, 1, torch.float32)
LIMITS = TargetLimits(rows=8, max_sweep_tokens=16, max_nodes=16, max_context=48)
ROWS = RowCounts(LIMITS.rows, LIMITS.rows)
FIGURES = Timings(100, 0, 40, 60, 80, 1000, 1, 60)


class FakeModel:
    """A target in whose text token t + 1 follows token t; each sweep waits until `gate` is set.

    It stores each token as its own key, and asserts in every sweep that slots hold the keys of their session's text.
    """

    device = CPU
    best: torch.Tensor | None = None
    kv_bytes = 0

    def __init__(self, rows: RowCounts = ROWS, figures: Timings = FIGURES) -> None:
        self.rows = rows
        self.figures = figures
        self.batches: list[Batch] = []
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.times: SweepTimes | None = None

    @property
    def num_computed(self) -> int:
        """Number of tokens in all sweeps so far."""
        return sum(batch.num_tokens for batch in self.batches)

    def sweep(self, batch: Batch) -> tuple[torch.Tensor, Timings]:
        self.batches.append(batch)
        assert self.gate.wait(10)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        for segment in batch.segments:
            slot, before = segment.slot, int(segment.positions[0])
            context = [token for s in batch.segments if s.slot is slot and not s.wants_logits for token in s.tokens]
            spelled = slot.keys[0, :before, 0, 0].tolist()
            assert spelled == [*slot.tokens, *context][:before], "keys are not those of the session's text"
            for keys in (slot.keys, slot.values):
                keys[0, torch.from_numpy(segment.rows), 0, 0] = torch.from_numpy(segment.tokens).float()
        tokens = batch.input_ids[0, batch.logit_rows]
        return torch.nn.functional.one_hot((tokens + 1) % VOCAB, VOCAB).float(), self.figures

    def warm_up(self, slot: KVSlot, most_rows: int) -> SweepTimes | None:
        if self.error is not None:
            raise self.error
        return self.times

    def wait_for_sweep(self, number: int = 1) -> None:
        """Wait until `number` sweeps have begun."""
        block_until(lambda: len(self.batches) >= number)


class Clock:
    """A clock that a test sets: `now` in seconds."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def new_pool(
    clock: Clock, num_rows: int = 2 * LIMITS.slot_rows, lease_seconds: float = 60.0, step_rows: int = 0
) -> SlotPool:
    """A slot pool, by default for two sessions of the longest context."""
    return SlotPool(KVArena(SHAPE, SHAPE.empty(num_rows, CPU)), lease_seconds, clock, step_rows)


@contextmanager
def running(
    model: FakeModel,
    pool: SlotPool,
    limits: TargetLimits = LIMITS,
    max_waiting: int = 100,
    max_delay: float = 0.0,
    lost_kv: Callable[[], bool] = lambda: False,
) -> Iterator[SweepEngine]:
    """Run a sweep engine whose thread ends with the block."""
    sweeper = StreamedSweeper(model, NO_GRAMMARS)
    engine = SweepEngine(sweeper, pool, limits, max_waiting, max_delay, lost_kv=lost_kv)
    engine.start()
    try:
        yield engine
    finally:
        model.gate.set()
        engine.stop()


def verify_call(
    session: str,
    tokens: Sequence[int],
    held: int = 0,
    round_: int = 0,
    epoch: int = 1,
    tree: Tree | None = None,
    max_length: int = 0,
) -> VerifyCall:
    """A call for a session with these tokens, the last being the tree's root; the target holds the first `held`."""
    context = Context.of(ScopedId(session), tokens, held, len(tokens))
    return VerifyCall(context, epoch, round_, tree or Tree.root(tokens[-1]), GREEDY, max_length=max_length)
