"""Measures the sizes of trees for a small random mixture of experts whose rows share experts, on the CPU.

    python -m loadtest.sweep.experts

Tokens have topics, and a text has one: its rows choose similar experts. First, sweeps of random tokens of a topic are
measured, with all experts in memory, in turns over numbers of rows. Seconds are those of the processor, as other
programs may run. Then all contestants generate the same texts in simulated time with sweeps drawn from these, and with
simulated guesses; a draft step takes a thirtieth of a sweep of one row. Ends with one JSON line:

experts     by rows: distinct experts over those of one row, as counted, as predicted after sweeps of the sizes `seen`,
            and if rows chose independently
seconds     by rows: seconds of a sweep over those of one row: measured, predicted, and predicted as for a dense model
speed       by acceptance: tokens per second over those of plain decoding, self-sized and for fixed sizes. "dense" is
            self-sized by what is learnt of a dense model; "nodes" are the mean sizes of both
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch

from bough.config.flag_parser import FlagParser
from bough.model.batch.batch import Batch, Segment
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.kv.session_kv import KVSlot
from bough.model.loading.loading import build_skeleton
from bough.protocol.generation import Speculation
from bough.simulation.acceptance_model import AcceptanceModel
from bough.simulation.profile import DraftProfile, Factors, Profile, SweepSeconds, TargetProfile
from bough.sizing.distinct_experts import Mixture, distinct_share
from bough.sizing.placement import Budgets, Fixed, place
from bough.sizing.sweep_times import SweepTimes
from bough.trees.tree import Tree
from bough.trees.tree_plan import BestFirst
from loadtest.gpu.experts import save_mixture
from loadtest.gpu.random_models import LINK_THREADS, planned
from loadtest.regret.regimes import GOOD, HARD, MEDIUM, WEAK, session_of
from loadtest.regret.simulated import NO_SHARING, PLAIN
from orchestrator.sizing.tree_sizer import TreeSizer
from simulator.world import World
from target_worker.sweep.streamed_model import StreamedModel
from target_worker.sweep.tiers import Tiers

LAYERS, NUM_TOPICS, NUM_TOKENS = 3, 8, 256
MIXTURE = Mixture(num_experts=64, num_chosen=4)
SEED = 1
ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96)  # measured
SEEN = (48, 1, 24)  # by which the others are predicted: a prompt, plain decoding, and the trees of a first guess
SHOWN = (2, 3, 4, 5, 8, 16, 64)
ACCEPTANCES = {"good": GOOD, "medium": MEDIUM, "weak": WEAK, "hard": HARD}
FIXED = (2, 3, 5, 8, 16)
MOST_NODES = 64
DRAFT_STEP = 1 / 30  # of a sweep of one row


class Ran(NamedTuple):
    """A sweep."""

    seconds: float
    expert_ratio: float


Turn = Mapping[int, Ran]  # by rows, one sweep each, measured after one another


@contextmanager
def opened(folder: Path) -> Iterator[StreamedModel]:
    """A random mixture with all its layers in memory."""
    save_mixture(folder, LAYERS, MIXTURE.num_experts, MIXTURE.num_chosen, SEED, NUM_TOPICS)
    skeleton = build_skeleton(Checkpoint.open(folder), torch.bfloat16)
    layers = planned(skeleton)
    sizes = [layer.num_bytes for layer in layers]
    placement = place(sizes, Fixed(0, 0, 0, 0), Budgets(2 * sum(sizes), 0, 2 * max(sizes), len(sizes)))
    with Tiers(layers, placement, LINK_THREADS) as tiers:
        yield StreamedModel(skeleton, tiers, max(ROWS), torch.device("cpu"))


def run(model: StreamedModel, num_rows: int, random: np.random.Generator) -> Ran:
    """Sweep a tree of random tokens of a random topic."""
    topic = random.integers(NUM_TOPICS)
    tokens = NUM_TOPICS * random.integers(0, NUM_TOKENS // NUM_TOPICS, num_rows) + topic
    parents = [-1] + [int(random.integers(0, node)) for node in range(1, num_rows)]
    slot = KVSlot(model.skeleton.kv_shape(), num_rows, model.device)
    tree = Tree.of(tokens.tolist(), parents, [0.0] * num_rows)
    batch, began = Batch([Segment.tree(slot, 0, tree)], model.rows, model.device), time.process_time()
    _, timings = model.sweep(batch)
    return Ran(time.process_time() - began, timings.expert_ratio)


@dataclass(frozen=True, slots=True)
class MeasuredTarget(TargetProfile):
    """A target whose sweeps are drawn from measured ones."""

    turns: Sequence[Turn] = field(kw_only=True)
    times: SweepTimes = field(kw_only=True)  # kept from text to text
    last: list[Ran] = field(default_factory=list)

    def sweep(self, num_rows: int, factors: Factors, random: Random) -> SweepSeconds:
        """A sweep of a random turn, between those of the next measured numbers of rows."""
        turn = random.choice(self.turns)
        self.last[:] = [Ran(*(float(np.interp(num_rows, ROWS, each)) for each in zip(*turn.values(), strict=True)))]
        return SweepSeconds(self.last[0].seconds, 0.0, 0.0)

    def expert_ratio(self, num_rows: int) -> float:
        """Of the last sweep."""
        return self.last[0].expert_ratio

    def known_times(self, factor: float) -> SweepTimes:
        """What earlier texts have taught."""
        return self.times


@dataclass(slots=True)
class Contestant:
    """A way to choose sizes, and what came of it."""

    sizer: TreeSizer
    speculation: Speculation
    profile: Profile
    seconds: float = 0.0
    sizes: list[int] = field(default_factory=list)

    def run(self, text: int, acceptance: AcceptanceModel, num_tokens: int) -> None:
        """Generate a text."""
        world = World(self.profile, self.sizer, self.speculation, text)
        world.observe_round = lambda tree, _: self.sizes.append(len(tree))
        self.seconds += sum(world.run([session_of(f"{text}", text, acceptance, num_tokens)]).values())


def speed(turns: Sequence[Turn], acceptance: AcceptanceModel, texts: int, num_tokens: int) -> dict[str, Any]:
    """Ratios to plain decoding, from the first text on, when nothing is known."""
    draft = DraftProfile(DRAFT_STEP * median(turn[1].seconds for turn in turns))

    def contestant(size: BestFirst, mixture: Mixture | None, speculation: Speculation, *fixed: int) -> Contestant:
        times = SweepTimes(1, max(ROWS), mixture=mixture)
        target = MeasuredTarget(max_nodes=MOST_NODES, max_sweep_rows=max(ROWS), turns=turns, times=times)
        sizer = TreeSizer(size, 24, *fixed)
        return Contestant(sizer, speculation, Profile(__name__, target, draft, acceptance))

    usual = BestFirst(64, 16, 7)
    made = {
        "plain": contestant(BestFirst(1, 1, 1), MIXTURE, PLAIN, NO_SHARING),
        "self-sized": contestant(usual, MIXTURE, Speculation()),
        "dense": contestant(usual, None, Speculation()),
    }
    for size in FIXED:
        growth = BestFirst(size, max(1, size // 2), min(6, size - 1))
        made[f"{size}"] = contestant(growth, MIXTURE, Speculation(), NO_SHARING)
    for text in range(texts):
        for each in made.values():
            each.run(text, acceptance, num_tokens)
    plain = made.pop("plain").seconds
    nodes = {name: round(fmean(made[name].sizes), 1) for name in ("self-sized", "dense")}
    return {name: round(plain / each.seconds, 3) for name, each in made.items()} | {"nodes": nodes}


def predictions(turns: Sequence[Turn]) -> dict[str, Any]:
    """What is predicted for each number of rows from three sweeps of each size in SEEN, and what was measured."""
    mixed, dense = SweepTimes(1, max(ROWS), mixture=MIXTURE), SweepTimes(1, max(ROWS))
    for turn in turns[:3]:
        for rows in SEEN:
            for times in (mixed, dense):
                times.observe(rows, turn[rows].seconds, expert_ratio=turn[rows].expert_ratio)
    curves, share = [times.curve() for times in (mixed, dense)], MIXTURE.chosen_share
    experts, seconds = {}, {}
    for rows in SHOWN:
        counted, independent = fmean(turn[rows].expert_ratio for turn in turns), distinct_share(share, rows) / share
        experts[rows] = [round(float(each), 2) for each in (counted, mixed.expert_ratio(rows), independent)]
        predicted = [curve(rows) / curve(1) for curve in curves if curve is not None]
        measured = median(turn[rows].seconds / turn[1].seconds for turn in turns)
        seconds[rows] = [round(each, 2) for each in (measured, *predicted)]
    row_seconds = median(turn[1].seconds for turn in turns)
    return {"seen": SEEN, "experts": experts, "seconds": seconds, "row_seconds": round(row_seconds, 4)}


def main() -> None:
    """Measure, and print one JSON line."""
    parser = FlagParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=24, help="sweeps of each number of rows")
    parser.add_argument("--texts", type=int, default=24, help="of each acceptance")
    parser.add_argument("--tokens", type=int, default=64, help="of a text")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    random, turns = np.random.default_rng(SEED), list[Turn]()
    with TemporaryDirectory() as folder, opened(Path(folder)) as model:
        for _ in range(arguments.turns + 1):
            turns.append({rows: run(model, rows, random) for rows in ROWS})
    figures, speeds = predictions(turns[1:]), dict[str, Any]()  # without the first, in which memory is touched
    for name, acceptance in ACCEPTANCES.items():
        speeds[name] = speed(turns[1:], acceptance, arguments.texts, arguments.tokens)
        print(f"{name}: {speeds[name]}", file=sys.stderr, flush=True)
    print(json.dumps({**figures, "speed": speeds, "seed": SEED, "cores": os.cpu_count()}))


if __name__ == "__main__":
    main()
