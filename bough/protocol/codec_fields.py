"""Fields that a plain value and its protobuf message have under the same names, and their conversion."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, reduce
from operator import or_
from types import NoneType
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from bough.errors import InvalidRequest
from bough.pb import common_pb2
from bough.protocol.decision import Mode
from bough.protocol.ids import ScopedId
from bough.trees.tree_plan import BestFirst, Growth, Scheme, StaticShape

Value = TypeVar("Value")
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


class _Conversion(NamedTuple):
    """How a value of a special kind is written to a message, and read by the name of its field."""

    write: Callable[[Any], Any]
    read: Callable[[str, Any], Any]


def _mode_from_wire(name: str, text: str) -> Mode:
    try:
        return Mode(text)
    except ValueError as exc:
        known = ", ".join(mode.value for mode in Mode)
        raise InvalidRequest(name, f"must be one of {known}", repr(text)) from exc


_CONVERSIONS: Mapping[Any, _Conversion] = {
    Growth: _Conversion(growth_to_wire, growth_from_wire),
    Scheme: _Conversion(SCHEMES.__getitem__, scheme_from_wire),
    ScopedId: _Conversion(str, lambda _, text: ScopedId.parse(text)),
    Mode: _Conversion(lambda mode: mode.value, _mode_from_wire),
}


class _Field(NamedTuple):
    name: str
    collect: Callable[[Any], Any] | None  # makes the value of a repeated field or a map
    convert: _Conversion | None  # of the value, or of its parts if they are messages or enums


def to_fields(value: Any, *besides: str) -> dict[str, Any]:
    """A message's fields from a dataclass or NamedTuple, except the named ones; None stays unset."""
    given = {}
    for field in _fields_of(type(value)):
        if field.name in besides or (mine := getattr(value, field.name)) is None:
            continue
        if field.convert is not None:
            write = field.convert.write
            mine = write(mine) if field.collect is None else [write(part) for part in mine]
        given[field.name] = sorted(mine) if field.collect is frozenset else mine
    return given


def from_fields(message: Any, kind: type[Value], *besides: str, within: str = "") -> dict[str, Any]:
    """Arguments for a dataclass or NamedTuple from a message, except the named ones; `within` prefixes names in errors.

    A field that is unset in the message gets its default.

    Raises:
        InvalidRequest: names the field that cannot be converted.
    """
    given = {}
    for field, may_be_unset in _readable(kind, type(message)):
        if field.name in besides or (may_be_unset and not message.HasField(field.name)):
            continue
        theirs = getattr(message, field.name)
        if field.convert is not None:
            name, convert = within + field.name, field.convert.read
            theirs = convert(name, theirs) if field.collect is None else (convert(name, one) for one in theirs)
        given[field.name] = theirs if field.collect is None else field.collect(theirs)
    return given


def read(message: Any, kind: type[Value], within: str = "") -> Value:
    """A value from a message that has all of its fields. Raises as `from_fields`."""
    return kind(**from_fields(message, kind, within=within))


def _described(kind: type) -> tuple[_Field, ...]:
    """The fields that are sent; fields with `compare=False` stay in their process."""
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind) if field.compare] if is_dataclass(kind) else hints
    return tuple(_field(name, hints[name]) for name in names)


def _field(name: str, hint: Any) -> _Field:
    if NoneType in get_args(hint):
        hint = reduce(or_, (kind for kind in get_args(hint) if kind is not NoneType))
    collects: dict[Any, Callable[[Any], Any]] = {tuple: tuple, frozenset: frozenset, Mapping: dict}
    collect = collects.get(get_origin(hint))
    part = get_args(hint)[0] if collect is tuple else hint
    convert = _CONVERSIONS.get(part)
    if convert is None and (is_dataclass(part) or hasattr(part, "_fields")):
        convert = _Conversion(to_fields, lambda name, message: read(message, part, f"{name}."))
    return _Field(name, collect, convert)


def _described_with(kind: type, message: type) -> tuple[tuple[_Field, bool], ...]:
    """Fields, and whether each may be unset in a message."""
    described = message.DESCRIPTOR.fields_by_name  # type: ignore[attr-defined]  # of every message
    parts = fields(kind) if is_dataclass(kind) else ()
    defaults = {part.name for part in parts if part.default is not MISSING or part.default_factory is not MISSING}
    return tuple(
        (field, field.name in defaults and field.name in described and described[field.name].has_presence)
        for field in _fields_of(kind)
    )


_fields_of: Callable[[Any], tuple[_Field, ...]] = cache(_described)
_readable: Callable[[Any, Any], tuple[tuple[_Field, bool], ...]] = cache(_described_with)


def like(kind: type[Value], source: object, **own: Any) -> Value:
    """A dataclass with the fields in `own`, and all others copied from the fields of the same names in `source`.

    A field that means something else in `source` must be among its `own`.
    """
    return kind(**{name: getattr(source, name) for name in _names(kind) if name not in own}, **own)


_names: Callable[[Any], tuple[str, ...]] = cache(lambda kind: tuple(field.name for field in fields(kind)))
