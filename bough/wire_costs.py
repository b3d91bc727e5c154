"""What calls and rounds took, and what they will take, to messages and back; for `bough.wire`."""

from __future__ import annotations

from dataclasses import asdict

from bough.messages import RoundTimings, Timings
from bough.pb import common_pb2, draft_pb2, generation_pb2, target_pb2
from bough.sizing.cost_curve import CostCurve


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
