"""Conversion of growths and schemes to and from protobuf."""

from __future__ import annotations

from bough.errors import InvalidRequest
from bough.pb import common_pb2
from bough.trees.tree_plan import BestFirst, Growth, Scheme, StaticShape

SCHEMES: dict[Scheme, common_pb2.VerificationScheme] = {scheme: getattr(common_pb2, scheme.name) for scheme in Scheme}


def growth_to_wire(growth: Growth) -> common_pb2.Growth:
    """Convert a growth of any kind."""
    match growth:
        case BestFirst():
            return common_pb2.Growth(best_first=common_pb2.BestFirst(**growth._asdict()))
        case StaticShape():
            return common_pb2.Growth(shape=common_pb2.StaticShape(parents=growth.parents))


def growth_from_wire(name: str, message: common_pb2.Growth) -> Growth:
    """Convert a growth; raises InvalidRequest if missing. `require_growth` checks sizes."""
    match message.WhichOneof("kind"):
        case "best_first":
            return BestFirst(*(getattr(message.best_first, size) for size in BestFirst._fields))
        case "shape":
            return StaticShape(tuple(message.shape.parents))
        case _:
            raise InvalidRequest(name, "must be best_first or shape", "none")


def scheme_from_wire(name: str, value: int) -> Scheme:
    """The scheme of a protobuf number; raises InvalidRequest if unknown."""
    for scheme, number in SCHEMES.items():
        if number == value:
            return scheme
    known = ", ".join(f"{number} ({scheme.value})" for scheme, number in SCHEMES.items())
    raise InvalidRequest(name, f"must be one of {known}", value)
