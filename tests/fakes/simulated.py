"""Profiles of simulated workers that answer within milliseconds, and the text that they must generate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bough.config.processes import DraftConfig, OrchestratorConfig, TargetConfig, parse
from bough.grammar.allowed_tokens import Grammars
from bough.processes.launch import Settings
from bough.simulation.acceptance_model import AcceptanceModel
from bough.simulation.clock import SimulatedClock
from bough.simulation.pair import SimulatedPair, simulated_pair
from bough.simulation.text_model import TextModel
from bough.trees.acceptance import smoothed
from bough.trees.optimal_tree import best_shape, expected_tokens

QUICK: dict[str, Any] = {
    "source": "made up for tests",
    "target": {"link_seconds": 0.4, "compute_base_seconds": 0.1, "compute_row_seconds": 0.01, "kv_tokens": 16384},
    "draft": {"base_seconds": 0.01, "row_seconds": 0.001, "prefill_token_seconds": 0.001},
    "acceptance": {"kind": "by_rank", "vector": [0.6, 0.15, 0.08, 0.04, 0.02, 0.01], "spread": 0.5},
    "network": {"one_way_seconds": 0.05},
    "clock_scale": 100,
}


def write_profile(folder: Path, name: str = "quick", **changes: Any) -> Path:
    """Write a profile: QUICK with `changes` to its fields."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps(QUICK | changes))
    return path


def simulated_settings(target: Path | str, draft: Path | str | None) -> Settings:
    """Settings of processes that simulate workers of these profiles on free ports."""
    return Settings(
        target=parse(TargetConfig, "t", ["--simulate", str(target)], {}),
        draft=parse(DraftConfig, "d", ["--simulate", str(draft)], {}) if draft else None,
        orchestrator=parse(OrchestratorConfig, "o", ["--port", "0"], {}),
    )


def pair_of(folder: Path, **changes: Any) -> SimulatedPair:
    """The simulated model pair of a profile: QUICK with `changes`."""
    return simulated_pair(str(write_profile(folder, **changes)))


def grammars_of(pair: SimulatedPair) -> Grammars:
    """Grammars of the pair's vocabulary."""
    return Grammars(pair.tokenizer, pair.vocab_size)


def text_of(pair: SimulatedPair, seed: int, begin: int, num: int) -> list[int]:
    """The `num` tokens from the absolute position `begin`."""
    return [int(token) for token in pair.text_model.truth(seed, np.arange(begin, begin + num))]


class TurnedClock(SimulatedClock):
    """A clock that only `turn` and sleeping advance; 100 simulated seconds are a real one."""

    def __init__(self) -> None:
        self.real_now = 0.0
        super().__init__(100.0, lambda: self.real_now, self.turn)

    def turn(self, seconds: float) -> None:
        """Advance the clock by real seconds."""
        self.real_now += seconds


def expected_tokens_of(model: AcceptanceModel, nodes: int, levels: int) -> float:
    """Expected tokens of the best fixed shape, the bonus token included; with `spread`, best-first trees have more."""
    acceptance = smoothed(model.acceptance())
    shape = best_shape(acceptance, nodes, levels)
    return expected_tokens(shape, acceptance) if shape.parents else 1.0


def true_ranks(model: TextModel, seed: int, positions: NDArray[np.integer], depth: int = 0) -> NDArray[np.integer]:
    """(n,) rank of the true token among the candidates on the true path; `num_ranks` if it is not among them."""
    tokens = model.candidates(seed, np.ones(len(positions), np.bool_), positions, depths=depth).tokens
    is_true = tokens == model.truth(seed, positions)[:, None]
    return np.where(is_true.any(axis=1), is_true.argmax(axis=1), model.num_ranks)
