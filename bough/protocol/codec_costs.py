"""What calls and rounds took, what they will take, and what was decided by that, to messages and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields

from bough.errors import InvalidRequest
from bough.pb import common_pb2, draft_pb2, generation_pb2, target_pb2
from bough.protocol.cost_curve import CostCurve
from bough.protocol.decision import Decision, Mode, Parts
from bough.protocol.messages import RoundTimings, Timings


def cost_to_wire(cost: CostCurve | None) -> common_pb2.CostCurve | None:
    """None stays unset."""
    return common_pb2.CostCurve(rows=cost.rows, seconds=cost.seconds, step=cost.step) if cost is not None else None


def cost_from_wire(
    message: draft_pb2.GrowReply | target_pb2.VerifyReply | common_pb2.WorkerInfo,
) -> CostCurve | None:
    """That of a message, if it has one; whether it makes sense is for `CostCurve.validate`."""
    if not message.HasField("cost"):
        return None
    return CostCurve(tuple(message.cost.rows), tuple(message.cost.seconds), message.cost.step)


def timings_to_wire(timings: Timings) -> common_pb2.Timings:
    """Field by field: the names are the same."""
    return common_pb2.Timings(**asdict(timings))


def timings_from_wire(message: common_pb2.Timings) -> Timings:
    """Field by field: the names are the same."""
    return Timings(**{field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields})


def round_timings_to_wire(timings: RoundTimings) -> generation_pb2.RoundTimings:
    """Field by field: the names are the same."""
    return generation_pb2.RoundTimings(**asdict(timings))


def round_timings_from_wire(message: generation_pb2.RoundTimings) -> RoundTimings:
    """Field by field: the names are the same."""
    return RoundTimings(**{field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields})


def decisions_to_wire(decisions: Sequence[Decision]) -> generation_pb2.Decisions:
    """Field by field: the names are the same."""
    reply = generation_pb2.Decisions()
    for decision in decisions:
        values = asdict(decision) | {"mode": decision.mode.value}
        for name in ("expected", "seconds"):
            values[name] = generation_pb2.RoundSeconds(**values[name])
        reply.decisions.append(generation_pb2.Decision(**values))
    return reply


def decisions_from_wire(message: generation_pb2.Decisions) -> tuple[Decision, ...]:
    """Raises InvalidRequest for a mode that is not known here."""
    return tuple(_decision_from_wire(decision) for decision in message.decisions)


def _decision_from_wire(message: generation_pb2.Decision) -> Decision:
    values = {field.name: getattr(message, field.name) for field in fields(Decision)}
    try:
        values["mode"] = Mode(message.mode)
    except ValueError as exc:
        known = ", ".join(mode.value for mode in Mode)
        raise InvalidRequest(f"decisions.mode: {message.mode!r}; must be one of {known}") from exc
    for name in ("expected", "seconds"):
        values[name] = Parts(*(getattr(values[name], part.name) for part in fields(Parts)))
    return Decision(**values)
