"""Summaries of rounds: predictions against outcomes, and the reason for each tree's size in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

from bough.protocol.decision import Decision, Mode, RoundSeconds

PART_NAMES = tuple(part.name for part in fields(RoundSeconds))


@dataclass(frozen=True, slots=True)
class ExpertAccount:
    """Means over the predicted rounds with a tree and counted experts, which are in multiples of one row's."""

    num_rows: float  # of a sweep
    expected: float  # distinct experts
    chosen: float
    sweep_growth: float  # expected seconds of these sweeps over those without a tree


@dataclass(frozen=True, slots=True)
class Account:
    """A summary of a session's rounds. A bias is expected over real, minus 1: 0.1 means 10 % too high."""

    num_rounds: int
    shares: Mapping[Mode, float]  # share of rounds by mode, without zeros
    mean_nodes: float  # verified nodes of a round, the root included
    tokens: int
    seconds: float
    num_predicted: int  # rounds with a prediction
    token_bias: float | None  # over the predicted rounds; None if there are none
    seconds_bias: float | None
    expected: RoundSeconds  # means over the predicted rounds
    real: RoundSeconds
    experts: ExpertAccount | None  # None if the sweeps chose no experts, or they were not counted
    rate: float  # tokens per second, over rounds with a known plain rate, or else over all
    plain_rate: float | None  # expected tokens per second without a draft, for the same tokens; None if unknown


def account(decisions: Sequence[Decision]) -> Account:
    """Summarise one or more rounds."""
    predicted = [decision for decision in decisions if decision.is_predicted]
    rated = [decision for decision in decisions if decision.plain_rate > 0]
    compared = rated or decisions
    plain_seconds = sum(each.tokens / _plain_rate(each, later) for each, later in pairwise([*rated, *rated[-1:]]))
    num_tokens = sum(each.tokens for each in compared)
    modes = Counter(decision.mode for decision in decisions)
    return Account(
        num_rounds=len(decisions),
        shares={mode: modes[mode] / len(decisions) for mode in Mode if modes[mode]},
        mean_nodes=sum(each.num_sent - each.num_left_out for each in decisions) / len(decisions),
        tokens=sum(each.tokens for each in decisions),
        seconds=sum(each.seconds.total for each in decisions),
        num_predicted=len(predicted),
        token_bias=_bias(predicted, lambda each: each.expected_tokens, lambda each: each.tokens),
        seconds_bias=_bias(predicted, lambda each: each.expected.total, lambda each: each.seconds.total),
        expected=_mean_parts([decision.expected for decision in predicted]),
        real=_mean_parts([decision.seconds for decision in predicted]),
        experts=_experts(predicted),
        rate=ratio(num_tokens, sum(each.seconds.total for each in compared)),
        plain_rate=num_tokens / plain_seconds if plain_seconds else None,
    )


def _experts(predicted: Sequence[Decision]) -> ExpertAccount | None:
    counted = [
        decision for decision in predicted if decision.expert_ratio and decision.num_sent > 1 and decision.plain_sweep
    ]
    if not counted:
        return None
    rows, expected, chosen = (
        sum(getattr(each, name) for each in counted) / len(counted)
        for name in ("num_rows", "expected_expert_ratio", "expert_ratio")
    )
    growth = sum(each.expected.sweep for each in counted) / sum(each.plain_sweep for each in counted)
    return ExpertAccount(rows, expected, chosen, growth)


def _plain_rate(decision: Decision, following: Decision) -> float:
    """The rate of plain decoding in a round, from the next round's prediction, which has learnt from the round.

    The rate of a round that reads a part of the prompt is valid only for that round.
    """
    reads = decision.num_context or following.num_context
    return decision.plain_rate if reads else following.plain_rate


def why(decision: Decision) -> str:
    """The reason for the size of a round's tree."""
    reason = _reason(decision)
    return f"{reason}; read {decision.num_context} tokens of context" if decision.num_context else reason


def _reason(decision: Decision) -> str:
    rates = f"{decision.draft_rate:.3g} against {decision.plain_rate:.3g} tokens/s plain"
    is_better = decision.draft_rate > decision.plain_rate
    match decision.mode:
        case Mode.OFF:
            return "no tree: the request disables trees, or one token is left"
        case Mode.FIXED:
            return "the size was fixed, by the request or by --planner fixed"
        case Mode.PROBE:
            return f"a small tree, to see whether drafting pays again: {rates}"
        case Mode.DRAFT if not decision.plain_rate:
            return "a first size: the time of sweeps is not known yet"
        case Mode.DRAFT if is_better:
            return f"drafting pays: {rates}"
        case Mode.DRAFT:
            return f"drafting continues: {rates} is not reason enough to stop"
        case Mode.LOOKUP if is_better:
            return f"no draft: {rates} is not reason enough to begin"
        case Mode.LOOKUP if decision.draft_rate == decision.plain_rate:
            return f"no draft: {decision.plain_rate:.3g} tokens/s plain"
        case Mode.LOOKUP:
            return f"drafting does not pay: {rates}"


def _bias(
    decisions: Sequence[Decision], expected: Callable[[Decision], float], real: Callable[[Decision], float]
) -> float | None:
    total = sum(map(real, decisions))
    return sum(map(expected, decisions)) / total - 1 if total else None


def _mean_parts(parts: Sequence[RoundSeconds]) -> RoundSeconds:
    return RoundSeconds(*(ratio(sum(getattr(each, name) for each in parts), len(parts)) for name in PART_NAMES))


def ratio(numerator: float, denominator: float) -> float:
    """The quotient; 0 if there is nothing to divide by."""
    return numerator / denominator if denominator else 0.0
