"""Conversion of timings, cost curves and round decisions to and from protobuf."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields

from bough.errors import InvalidRequest
from bough.pb import common_pb2, draft_pb2, generation_pb2, target_pb2
from bough.protocol.cost_curve import CostCurve
from bough.protocol.decision import Decision, Mode, RoundSeconds
from bough.protocol.messages import RoundTimings, Timings


def cost_to_wire(cost: CostCurve | None) -> common_pb2.CostCurve | None:
    """Convert field by field; None stays unset."""
    return common_pb2.CostCurve(rows=cost.rows, seconds=cost.seconds, step=cost.step) if cost is not None else None


def cost_from_wire(
    message: draft_pb2.GrowReply | target_pb2.VerifyReply | common_pb2.WorkerInfo,
) -> CostCurve | None:
    """The message's cost curve, or None; `CostCurve.validate` checks it."""
    if not message.HasField("cost"):
        return None
    return CostCurve(tuple(message.cost.rows), tuple(message.cost.seconds), message.cost.step)


def timings_to_wire(timings: Timings) -> common_pb2.Timings:
    """Convert field by field; the names are the same on both sides."""
    return common_pb2.Timings(**asdict(timings))


def timings_from_wire(message: common_pb2.Timings) -> Timings:
    """Convert field by field; the names are the same on both sides."""
    return Timings(**{field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields})


def round_timings_to_wire(timings: RoundTimings) -> generation_pb2.RoundTimings:
    """Convert field by field; the names are the same on both sides."""
    return generation_pb2.RoundTimings(**asdict(timings))


def round_timings_from_wire(message: generation_pb2.RoundTimings) -> RoundTimings:
    """Convert field by field; the names are the same on both sides."""
    return RoundTimings(**{field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields})


def decisions_to_wire(decisions: Sequence[Decision]) -> generation_pb2.Decisions:
    """Convert field by field; the names are the same on both sides."""
    reply = generation_pb2.Decisions()
    for decision in decisions:
        values = asdict(decision) | {"mode": decision.mode.value}
        for name in ("expected", "seconds"):
            values[name] = generation_pb2.RoundSeconds(**values[name])
        reply.decisions.append(generation_pb2.Decision(**values))
    return reply


def decisions_from_wire(message: generation_pb2.Decisions) -> tuple[Decision, ...]:
    """Convert; raises InvalidRequest for an unknown mode."""
    return tuple(_decision_from_wire(decision) for decision in message.decisions)


def _decision_from_wire(message: generation_pb2.Decision) -> Decision:
    values = {field.name: getattr(message, field.name) for field in fields(Decision)}
    try:
        values["mode"] = Mode(message.mode)
    except ValueError as exc:
        known = ", ".join(mode.value for mode in Mode)
        raise InvalidRequest(f"decisions.mode: must be one of {known}, got {message.mode!r}") from exc
    for name in ("expected", "seconds"):
        values[name] = RoundSeconds(*(getattr(values[name], part.name) for part in fields(RoundSeconds)))
    return Decision(**values)
