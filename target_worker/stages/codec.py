"""Conversion of the messages of head and stages to and from protobuf."""

from __future__ import annotations

from typing import TypeAlias

from bough.errors import InvalidRequest
from bough.pb import stage_pb2
from bough.protocol.codec_fields import read, to_fields
from target_worker.stages.frames import Heartbeat, Hello, Piece, RingEnd
from target_worker.stages.roster import Assignment, JoinCall

Passed: TypeAlias = Hello | Piece | Heartbeat | RingEnd

_KINDS: dict[str, type[Passed]] = {"hello": Hello, "piece": Piece, "heartbeat": Heartbeat, "end": RingEnd}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def passed_to_wire(message: Passed) -> stage_pb2.PassRequest:
    """The message to a successor."""
    return stage_pb2.PassRequest(**{_NAMES[type(message)]: to_fields(message)})


def passed_from_wire(message: stage_pb2.PassRequest) -> Passed:
    """The message of a predecessor. Raises InvalidRequest; `Hello.validate` and `Assembler` check the values."""
    name = message.WhichOneof("kind")
    if name is None:
        raise InvalidRequest("kind", f"must be one of {', '.join(_KINDS)}", "none")
    return read(getattr(message, name), _KINDS[name], f"{name}.")


def reply_to_wire(why: str = "") -> stage_pb2.PassReply:
    """What a member says to its predecessor: it lives, or why the epoch is over."""
    return stage_pb2.PassReply(why=why)


def join_to_wire(call: JoinCall) -> stage_pb2.JoinRequest:
    """A stage's call."""
    return stage_pb2.JoinRequest(**to_fields(call))


def join_from_wire(message: stage_pb2.JoinRequest) -> JoinCall:
    """A stage's call, every field checked. Raises InvalidRequest."""
    call = read(message, JoinCall)
    call.validate()
    return call


def join_reply_to_wire(answer: Assignment | int) -> stage_pb2.JoinReply:
    """The head's answer: a stage's layers, or how many stages are missing."""
    if isinstance(answer, int):
        return stage_pb2.JoinReply(num_missing=answer)
    return stage_pb2.JoinReply(assignment=to_fields(answer))


def join_reply_from_wire(message: stage_pb2.JoinReply) -> Assignment | int:
    """The head's answer."""
    return read(message.assignment, Assignment) if message.HasField("assignment") else message.num_missing
