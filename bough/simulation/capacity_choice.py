"""The size of a round's tree: most expected tokens per second (DESIGN.md, rule 5), plain decoding included.

A session's round takes drafting, two calls and a sweep, in which its riders' trees are computed too; where more
sessions run than ride together, it cannot take less than as many sweeps as those need. A pure decision: it knows the
profile's own curves, as a sizer knows them that has measured for long enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from bough.acceptance import FloatArray
from bough.simulation.profile import Factors, Profile
from bough.simulation.round_yield import RoundYield

SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
DEPTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 17, 20, 24, 28, 32, 40, 48)
MOST_WIDTH = 64  # nodes of one session that a draft step expands
LEAST_CONTEXT = 64  # rows that a sweep keeps for prompts
DENSE = 8  # loads below are told apart one by one, above by steps of an eighth


class Size(NamedTuple):
    """Of a round's tree; one node and no depth is plain decoding."""

    nodes: int
    depth: int

    @property
    def frontier(self) -> int:
        """Rows of this session in each of its draft steps."""
        return min(MOST_WIDTH, -(-self.nodes // self.depth)) if self.depth else 0


PLAIN = Size(1, 0)


class Load(NamedTuple):
    """What else a round's workers do, on average."""

    running: int = 1  # sessions at the target, this one included
    riders: int = 1  # of them, in one sweep
    drafting: int = 1  # sessions in one draft step
    context: int = 0  # rows of prompts in a sweep

    def rounded(self) -> Load:
        """One of few loads, so that decisions can be kept."""
        running, riders, drafting, context = map(_rounded, self)
        return Load(running, riders, drafting, context)


def _rounded(number: int) -> int:
    if number <= DENSE:
        return number
    step = 1 << (number.bit_length() - 4)
    return number // step * step


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a size comes to."""

    size: Size
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second of this session."""
        return self.tokens / self.seconds


class SizeChoice:
    """Chooses sizes for one profile and law; decisions are kept by load."""

    def __init__(self, profile: Profile, tokens: RoundYield, has_draft: bool, is_fixed: Size | None = None) -> None:
        """Always `is_fixed`, divided among riders within the knee, where one is given."""
        self._profile = profile
        self._yield = tokens
        self._fixed = is_fixed
        self._may_draft = has_draft and not tokens.is_worthless
        self._known: dict[tuple[Load, Factors], Prediction] = {}
        self._probs: dict[Size, FloatArray] = {}

    def depth_probs(self, size: Size) -> FloatArray:
        """(depth,) how often a round of this size accepts a path as deep as each level."""
        if size not in self._probs:
            self._probs[size] = self._yield.depth_probs(*size)
        return self._probs[size]

    def choose(self, load: Load, factors: Factors | None = None) -> Prediction:
        """The size worth most under this load."""
        load = load._replace(running=max(1, load.running), riders=max(1, load.riders), drafting=max(1, load.drafting))
        key = load.rounded(), factors or Factors()
        if key not in self._known:
            self._known[key] = self._best(*key)
        return self._known[key]

    def seconds(self, size: Size, load: Load, factors: Factors) -> float:
        """A round's: drafting, calls, and sweeps of all that run at the target."""
        profile = self._profile
        sweep = profile.target.sweep_seconds(load.riders * size.nodes + load.context, factors)
        own = sweep + profile.network.call_seconds(factors)
        if size.depth:
            step = profile.draft.step_seconds(load.drafting * size.frontier, factors)
            own += size.depth * step + profile.network.call_seconds(factors)
        return max(own, sweep * load.running / load.riders)

    def _best(self, load: Load, factors: Factors) -> Prediction:
        if self._fixed is not None and self._may_draft:
            share = max(4, self._fixed.nodes // load.running)
            size = self._fixed._replace(nodes=min(self._fixed.nodes, share))
            return self._prediction(size, load, factors)
        best = self._prediction(PLAIN, load, factors)
        target = self._profile.target
        room = max(2, target.max_sweep_rows - LEAST_CONTEXT)
        most = min(target.max_nodes, max(1, room // load.riders))
        for nodes in SIZES if self._may_draft else ():
            for depth in DEPTHS:
                if nodes > most or depth >= nodes:
                    break
                found = self._prediction(Size(nodes, depth), load, factors)
                best = found if found.rate > best.rate else best
        return best

    def _prediction(self, size: Size, load: Load, factors: Factors) -> Prediction:
        tokens = 1.0 + float(self.depth_probs(size).sum())
        return Prediction(size, tokens, self.seconds(size, load, factors))
