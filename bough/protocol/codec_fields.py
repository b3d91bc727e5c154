"""Fields that a plain value and its protobuf message have under the same names, and their conversion."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

Value = TypeVar("Value")


class _Field(NamedTuple):
    name: str
    collect: Callable[[Any], Any] | None  # makes the value of a repeated field or a map
    part: type | None  # class of the value, or of its parts, where these have messages of their own


def to_fields(value: Any, *besides: str) -> dict[str, Any]:
    """A message's fields from a dataclass or NamedTuple, but those named; None stays unset."""
    given = {}
    for field in _fields_of(type(value)):
        if field.name in besides or (mine := getattr(value, field.name)) is None:
            continue
        if field.part is not None:
            mine = to_fields(mine) if field.collect is None else [to_fields(part) for part in mine]
        given[field.name] = sorted(mine) if field.collect is frozenset else mine
    return given


def from_fields(message: Any, kind: type[Value], *besides: str) -> dict[str, Any]:
    """Arguments for a dataclass or NamedTuple from a message, but those named.

    A field that the message tells to be unset is left to the default.
    """
    given = {}
    for field, may_be_unset in _readable(kind, type(message)):
        if field.name in besides or (may_be_unset and not message.HasField(field.name)):
            continue
        theirs = getattr(message, field.name)
        if field.part is not None:
            part = field.part
            theirs = read(theirs, part) if field.collect is None else (read(one, part) for one in theirs)
        given[field.name] = theirs if field.collect is None else field.collect(theirs)
    return given


def read(message: Any, kind: type[Value]) -> Value:
    """A value all of whose fields the message has."""
    return kind(**from_fields(message, kind))


def _described(kind: type) -> tuple[_Field, ...]:
    """Those that are sent: fields that do not count in a comparison stay in their process."""
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind) if field.compare] if is_dataclass(kind) else hints
    return tuple(_field(name, hints[name]) for name in names)


def _field(name: str, hint: Any) -> _Field:
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    if NoneType in get_args(hint) and len(kinds) == 1:
        hint, kinds = kinds[0], [*get_args(kinds[0])]
    collects: dict[Any, Callable[[Any], Any]] = {tuple: tuple, frozenset: frozenset, Mapping: dict}
    collect = collects.get(get_origin(hint))
    part = kinds[0] if collect is tuple else hint
    return _Field(name, collect, part if is_dataclass(part) or hasattr(part, "_fields") else None)


def _described_with(kind: type, message: type) -> tuple[tuple[_Field, bool], ...]:
    """Fields, and whether a message may leave each to its default."""
    described = message.DESCRIPTOR.fields_by_name  # type: ignore[attr-defined]  # of every message
    parts = fields(kind) if is_dataclass(kind) else ()
    defaults = {part.name for part in parts if part.default is not MISSING or part.default_factory is not MISSING}
    return tuple(
        (field, field.name in defaults and field.name in described and described[field.name].has_presence)
        for field in _fields_of(kind)
    )


_fields_of: Callable[[Any], tuple[_Field, ...]] = cache(_described)
_readable: Callable[[Any, Any], tuple[tuple[_Field, bool], ...]] = cache(_described_with)
