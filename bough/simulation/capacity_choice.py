"""The choice of the tree size with the most expected tokens per second (docs/design.md, rule 5), or plain decoding.

A round takes drafting, two calls, and a sweep with the trees of all riders; if more sessions run than ride in one
sweep, it takes at least the sweeps that all need. Prompts are computed in the same sweeps, and more of them the more
tokens a round brings. The choice uses the profile's own curves, like a sizer that has measured for long enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from bough.simulation.profile import UNCHANGED, Factors, Profile
from bough.simulation.round_yield import RoundYield
from bough.trees.acceptance import FloatArray

NODES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
DEPTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 17, 20, 24, 28, 32, 40, 48)
MOST_WIDTH = 64  # nodes of one session that a draft step expands
LEAST_CONTEXT = 64  # rows of a sweep reserved for prompts
LEAST_SHARE = 4  # fewest nodes of a fixed tree divided among sessions, as in the orchestrator's fixed planner
DENSE = 8  # loads up to here are exact, larger ones are rounded to steps of an eighth


class Size(NamedTuple):
    """The size of a round's tree; one node and depth 0 is plain decoding."""

    nodes: int
    depth: int

    @property
    def frontier(self) -> int:
        """Rows of this session in each draft step."""
        return min(MOST_WIDTH, -(-self.nodes // self.depth)) if self.depth else 0


PLAIN = Size(1, 0)


class RoundLoad(NamedTuple):
    """The mean load of a round's workers."""

    running: int = 1  # sessions at the target, this one included
    riders: int = 1  # sessions in one sweep
    drafting: int = 1  # sessions in one draft step
    context: int = 0  # rows of prompts in a sweep
    halves: int = 2  # half tokens of a round, measured together with `context`

    def rounded(self) -> RoundLoad:
        """The load rounded to few values, so that decisions can be cached."""
        running, riders, drafting, context, halves = map(_rounded, self)
        return RoundLoad(max(1, running), max(1, riders), max(1, drafting), context, max(2, halves))


@lru_cache(maxsize=4096)  # called millions of times, with few numbers
def _rounded(number: int) -> int:
    if number <= DENSE:
        return number
    step = 1 << (number.bit_length() - 4)
    return number // step * step


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted outcome of a size."""

    size: Size
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second of this session."""
        return self.tokens / self.seconds


class SizeChoice:
    """Chooses sizes for one profile and acceptance distribution; decisions are cached by load."""

    def __init__(self, profile: Profile, tokens: RoundYield, has_draft: bool, is_fixed: Size | None = None) -> None:
        """With `is_fixed`, this size is always chosen, divided among sessions."""
        self._profile = profile
        self._yield = tokens
        may_draft = has_draft and not tokens.is_worthless
        sizes = [Size(nodes, depth) for nodes in NODES for depth in DEPTHS if depth < nodes <= profile.target.max_nodes]
        self._sizes = [PLAIN, *(sizes if may_draft else [])]
        self._fixed = is_fixed if may_draft else None
        self._tokens = np.array([1.0 + float(self.depth_probs(size).sum()) for size in self._sizes])
        self._nodes = np.array([size.nodes for size in self._sizes])
        self._depths = np.array([size.depth for size in self._sizes])
        self._frontiers = np.array([size.frontier for size in self._sizes])
        self._known: dict[tuple[RoundLoad, Factors], Prediction] = {}
        self._negated: dict[Size, list[float]] = {}
        self._sweeps: dict[Factors, FloatArray] = {}

    def depth_probs(self, size: Size) -> FloatArray:
        """(depth,) probability that a round of this size accepts a path as deep as each level."""
        return self._yield.depth_probs(*size)

    def negated_probs(self, size: Size) -> list[float]:
        """`depth_probs`, negated and so ascending, as `bisect` wants them."""
        if size not in self._negated:
            self._negated[size] = (-self.depth_probs(size)).tolist()
        return self._negated[size]

    def choose(self, load: RoundLoad, factors: Factors = UNCHANGED) -> Prediction:
        """The best size under this load."""
        key = load.rounded(), factors
        if key not in self._known:
            self._known[key] = self._best(*key)
        return self._known[key]

    def _best(self, load: RoundLoad, factors: Factors) -> Prediction:
        if self._fixed is not None:
            nodes = min(self._fixed.nodes, max(LEAST_SHARE, self._fixed.nodes // load.running))
            size = Size(nodes, min(self._fixed.depth, nodes - 1))
            tokens = 1.0 + float(self.depth_probs(size).sum())
            seconds = self._seconds(load, factors, *(np.array([value]) for value in (*size, size.frontier, tokens)))
            return Prediction(size, tokens, float(seconds[0]))
        room = max(2, self._profile.target.max_sweep_rows - LEAST_CONTEXT) // load.riders
        seconds = self._seconds(load, factors, self._nodes, self._depths, self._frontiers, self._tokens)
        rates = np.where(self._nodes <= max(1, room), self._tokens / seconds, 0.0)
        best = int(rates.argmax())
        return Prediction(self._sizes[best], float(self._tokens[best]), float(seconds[best]))

    def _seconds(
        self,
        load: RoundLoad,
        factors: Factors,
        nodes: FloatArray,
        depths: FloatArray,
        frontiers: FloatArray,
        tokens: FloatArray,
    ) -> FloatArray:
        """(num_sizes,) seconds of a round: drafting, calls, and the sweeps of all sessions at the target."""
        draft, call = self._profile.draft, self._profile.network.call_seconds(factors)
        rows = load.riders * nodes + np.rint(load.context * tokens / (load.halves / 2)).astype(np.int64)
        sweep = self._sweep_seconds(rows, factors)
        step = (draft.base_seconds + draft.row_seconds * load.drafting * frontiers) * factors.draft
        own = sweep + call + depths * step + np.where(depths > 0, call, 0.0)
        return np.asarray(np.maximum(own, sweep * (load.running / load.riders)))

    def _sweep_seconds(self, rows: FloatArray, factors: Factors) -> FloatArray:
        """(num_sizes,) seconds of sweeps, from a cached table; rows beyond a sweep's maximum take further sweeps."""
        target = self._profile.target
        most = target.max_sweep_rows
        if factors not in self._sweeps:
            self._sweeps[factors] = np.array([target.sweep_seconds(row, factors) for row in range(1, most + 1)])
        return np.asarray(self._sweeps[factors][np.minimum(rows, most) - 1] * np.maximum(1.0, rows / most))
