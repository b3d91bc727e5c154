"""How long a request is expected to take at a target: to wait there, to read its prompt, and for its rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bough.protocol.cost_curve import CostCurve
from bough.protocol.messages import VerifyResult, WorkerInfo
from bough.registry.records import WorkerLoad
from orchestrator.sizing.worker_times import Recent, TargetTimes

USUAL_OUTPUT = 128  # tokens that an answer is taken to come to, where as many may come
USUAL_ROWS = 8.0  # of a session in a sweep, before any were seen
USUAL_TOKENS = 2.0  # of a round, likewise
UNKNOWN = CostCurve((1, 512), (0.1, 1.0))  # of a target that tells nothing of its sweeps


@dataclass(frozen=True, slots=True)
class Need:
    """What a request asks of a target."""

    num_tokens: int  # before the first that is generated
    num_output: int  # most that may be generated
    held: Mapping[str, int]  # leading ones whose KV a target is believed to hold, by its name
    home_id: str = ""  # of the target that has the session's own slot, if any has


@dataclass(slots=True)
class UsualRound:
    """What the last rounds came to, at whichever target: between targets it is to make no difference."""

    tree_rows: Recent = field(default_factory=lambda: Recent(USUAL_ROWS))  # of a session in a sweep
    num_tokens: Recent = field(default_factory=lambda: Recent(USUAL_TOKENS))

    def observe(self, result: VerifyResult) -> None:
        """A round is over."""
        self.num_tokens.add(len(result.verdict.accepted_nodes) + 1)
        if result.num_trees:
            self.tree_rows.add(result.num_rows / result.num_trees)


@dataclass(slots=True)
class ExpectedWait:
    """How fast one target is: what it tells of its sweeps, and how long requests have stayed there."""

    times: TargetTimes = field(default_factory=TargetTimes)
    stay_seconds: Recent = field(default_factory=lambda: Recent(0.0))  # that a request has had its slot

    @property
    def curve(self) -> CostCurve:
        """Seconds of a sweep by its rows."""
        return self.times.curve or UNKNOWN


def expected_seconds(
    pace: ExpectedWait, usual: UsualRound, info: WorkerInfo, load: WorkerLoad, num_running: int, need: Need
) -> float:
    """Seconds until a request would be over at a target, where this orchestrator runs `num_running` others.

    What it lacks of the prompt is read beside the trees of those who are there; of a sweep that is under way half is
    waited for, on average; then each round takes a sweep of all. Where there is no room, somebody must end first.
    """
    num_others = max(num_running, _num_held(info, load) - (need.home_id == info.worker_id))
    other_rows = round(num_others * usual.tree_rows.median)
    curve = pace.curve
    reading = curve(max(1, need.num_tokens - need.held.get(info.worker_id, 0)) + other_rows)
    waiting = curve(other_rows) / 2 if num_others else 0.0
    num_rounds = max(1.0, min(need.num_output, USUAL_OUTPUT) / usual.num_tokens.median)
    working = num_rounds * curve(other_rows + round(usual.tree_rows.median))
    if need.home_id != info.worker_id and _lacks_room(info, load, need):
        waiting += expected_wait(pace, num_others, reading + working)
    return reading + waiting + working


def expected_wait(pace: ExpectedWait, num_there: int, usual_seconds: float) -> float:
    """Seconds until one of those who have a slot ends; a stay is taken to be as long as this request's own at first."""
    return (pace.stay_seconds.median or usual_seconds) / max(1, num_there)


def _num_held(info: WorkerInfo, load: WorkerLoad) -> int:
    """Sessions in use there, of all orchestrators, at least: short ones take less room than is reckoned here."""
    return int(info.max_sessions * load.kv_used_bytes / load.kv_bytes) if load.kv_bytes else 0


def _lacks_room(info: WorkerInfo, load: WorkerLoad, need: Need) -> bool:
    """Whether there is surely no room. Where it is only likely, the target itself knows better."""
    length = min(need.num_tokens + 1, info.max_context)  # slots grow with their texts
    # One session more of the longest context would not have fit.
    token_bytes = load.kv_bytes / ((info.max_sessions + 1) * (info.max_context + info.max_nodes))
    return load.kv_bytes > 0 and length * token_bytes > load.kv_bytes - load.kv_used_bytes
