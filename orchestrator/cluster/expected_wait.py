"""The expected time of a request at a target: waiting, reading the prompt, and its rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bough.protocol.cost_curve import CostCurve
from bough.protocol.generation import WorkerInfo
from bough.protocol.messages import VerifyResult
from bough.registry.records import WorkerLoad
from orchestrator.sizing.round_times import RecentMedian, WorkerTimes

USUAL_OUTPUT = 128  # tokens that an answer is expected to have, unless limited to fewer
USUAL_ROWS = 8.0  # of a session in a sweep, before any were observed
USUAL_TOKENS = 2.0  # of a round, before any were observed
UNKNOWN = CostCurve((1, 512), (0.1, 1.0))  # assumed for a target that reports no cost curve


@dataclass(frozen=True, slots=True)
class Need:
    """What a request needs from a target."""

    num_tokens: int  # before the first generated one
    num_output: int  # limit of generated tokens
    held: Mapping[str, int]  # leading tokens whose KV a target is believed to hold, by worker id
    home_id: str = ""  # id of the target with the session's own slot, if any
    knows_held: bool = True  # False if the index could not be asked


@dataclass(slots=True)
class UsualRound:
    """Sizes of recent rounds at any target; shared by all, so that it does not affect the choice."""

    tree_rows: RecentMedian = field(default_factory=lambda: RecentMedian(USUAL_ROWS))  # of a session in a sweep
    num_tokens: RecentMedian = field(default_factory=lambda: RecentMedian(USUAL_TOKENS))

    def observe(self, result: VerifyResult) -> None:
        self.num_tokens.add(len(result.verdict.accepted_nodes) + 1)
        if result.num_trees:
            self.tree_rows.add(result.num_rows / result.num_trees)


def expected_seconds(
    times: WorkerTimes, usual: UsualRound, info: WorkerInfo, load: WorkerLoad, num_running: int, need: Need
) -> float:
    """Expected seconds of a request at a target, where this orchestrator runs `num_running` others.

    Missing tokens of the prompt are read in sweeps with other sessions' trees; on average half of a running sweep is
    waited for; then each round takes a sweep of all. Without room, another session must end first.
    """
    num_others = max(num_running, _num_held(info, load) - (need.home_id == info.worker_id))
    other_rows = round(num_others * usual.tree_rows.median)
    curve = times.curve or UNKNOWN
    reading = curve(max(1, need.num_tokens - need.held.get(info.worker_id, 0)) + other_rows)
    waiting = curve(other_rows) / 2 if num_others else 0.0
    num_rounds = max(1.0, min(need.num_output, USUAL_OUTPUT) / usual.num_tokens.median)
    working = num_rounds * curve(other_rows + round(usual.tree_rows.median))
    if need.home_id != info.worker_id and _lacks_room(info, load, need):
        waiting += expected_wait(times, num_others, reading + working)
    return reading + waiting + working


def expected_wait(times: WorkerTimes, num_there: int, usual_seconds: float) -> float:
    """Seconds until a session with a slot ends; before any was observed, it is assumed to take `usual_seconds`."""
    return (times.stay_seconds.median or usual_seconds) / max(1, num_there)


def _num_held(info: WorkerInfo, load: WorkerLoad) -> int:
    """Estimate of sessions in use there by all orchestrators; a lower bound, as short ones take less room."""
    return int(info.max_sessions * load.kv_used_bytes / load.kv_bytes) if load.kv_bytes else 0


def _lacks_room(info: WorkerInfo, load: WorkerLoad, need: Need) -> bool:
    """Whether there is certainly no room; in doubt the target decides."""
    length = min(need.num_tokens + 1, info.max_context)  # slots grow with their texts
    # One more session of the longest context would not have fit.
    token_bytes = load.kv_bytes / ((info.max_sessions + 1) * (info.max_context + info.max_nodes))
    return load.kv_bytes > 0 and length * token_bytes > load.kv_bytes - load.kv_used_bytes
