"""Trees of a simulated draft, without torch.

`python -m tests.fakes.simulated_growth FOLDER` grows a tree in a process of its own, and prints it as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from bough.model.kv.arena import Arena
from bough.protocol.ids import ScopedId
from bough.protocol.messages import Context, GrowCall, GrowResult
from bough.protocol.sampling_params import SamplingParams
from bough.simulation.clock import SimulatedClock
from bough.simulation.pair import SimulatedPair
from bough.trees.tree_plan import BestFirst, TreePlan
from draft_worker.candidates.candidates import TemperatureScalings
from draft_worker.engine.engine import DraftEngine, PendingGrow
from draft_worker.engine.session import Window
from draft_worker.engine.session_pool import SessionPool
from draft_worker.simulated import SimulatedDraft
from tests.fakes.simulated import TurnedClock, grammars_of, pair_of


def grown(
    pair: SimulatedPair, clock: SimulatedClock, calls: Sequence[GrowCall], power: float = 1.0
) -> list[GrowResult]:
    """Results of calls whose trees grow together in one engine."""
    window = Window(1000, 2000)
    arena = Arena(len(calls) * window.max_rows, 1, rows_to_keep=lambda slot: slot.num_rows)
    draft, pool = SimulatedDraft(pair, clock, grammars_of(pair)), SessionPool(arena, window)
    engine = DraftEngine(draft, pair.vocab_size, 16, pool, 0, TemperatureScalings(power))
    requests = [PendingGrow(call, Future(), 0) for call in calls]
    for request in requests:
        engine.start(request)
    while engine.is_growing:
        engine.step()
    return [request.future.result(0) for request in requests]


def wide_tree(folder: Path) -> list[list[float]]:
    """Tokens, parents and log-probabilities of a tree whose draft probabilities are raised to the power 1.7."""
    context = Context.of(ScopedId("s"), [*range(300, 340)], 0, 3)
    plan = TreePlan(BestFirst(40, 8, 5))
    call = GrowCall(context, 339, SamplingParams(temperature=0.8, seed=11), context.base_length, plan)
    tree = grown(pair_of(folder), TurnedClock(), [call], power=1.7)[0].tree
    return [tree.tokens.tolist(), tree.parents.tolist(), tree.log_probs.tolist()]


if __name__ == "__main__":
    print(json.dumps([sorted({"numba", "torch"} & set(sys.modules)), wide_tree(Path(sys.argv[1]))]))
