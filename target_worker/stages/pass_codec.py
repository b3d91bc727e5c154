"""Passes as headers and bodies of frames."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from bough.errors import InvalidRequest
from bough.pb import common_pb2, stage_pass_pb2
from bough.protocol.codec_fields import read, to_fields
from bough.protocol.messages import Timings
from target_worker.stages.passes import NAMES, PassRows, StagePass, body_of, hidden_of
from target_worker.stages.slots import ChangeKind, SlotChange


def pass_to_wire(each: StagePass) -> tuple[bytes, memoryview]:
    """The header and body of a pass."""
    header = stage_pass_pb2.StagePass(
        changes=[
            stage_pass_pb2.SlotChange(slot=change.slot, kind=change.kind.value, numbers=change.numbers)  # type: ignore[arg-type]
            for change in each.changes
        ],
        rows=[stage_pass_pb2.PassRows(**rows._asdict()) for rows in each.rows],
        dtype=NAMES[each.hidden.dtype],
        width=each.hidden.shape[1],
        timings=[common_pb2.Timings(**to_fields(timings)) for timings in each.timings],
        full=each.full,
    )
    return header.SerializeToString(), body_of(each.hidden)


def pass_from_wire(header: bytes, body: bytes | memoryview) -> StagePass:
    """Read a pass. Raises InvalidRequest, which names the field."""
    try:
        message = stage_pass_pb2.StagePass.FromString(header)
    except DecodeError as exc:
        raise InvalidRequest("header", "must be a valid message", f"{len(header)} bytes: {exc}") from exc
    changes = [SlotChange(each.slot, _kind(each.kind), tuple(each.numbers)) for each in message.changes]
    rows = [PassRows(each.slot, each.base, each.num_tokens, tuple(each.parents)) for each in message.rows]
    timings = tuple(read(each, Timings) for each in message.timings)
    return StagePass(changes, rows, hidden_of(body, message.dtype, message.width), timings, message.full)


def _kind(number: int) -> ChangeKind:
    try:
        return ChangeKind(number)
    except ValueError as exc:
        known = ", ".join(f"{kind.value} ({kind.name})" for kind in ChangeKind)
        raise InvalidRequest("changes.kind", f"must be one of {known}", number) from exc
