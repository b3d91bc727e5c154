"""Reading JSON values into frozen dataclasses; errors name the field."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import MISSING, field, fields
from typing import Any, TypeVar

from bough.errors import ConfigError

Reader = Callable[[str, Any], Any]  # given a field's full name and its JSON value
Part = TypeVar("Part")


def refusal(name: str, value: object, must_be: str) -> ConfigError:
    """The error for an invalid field, with what it must be and what it was."""
    return ConfigError(f"{name}: must be {must_be}, got {value!r}")


def described(read: Reader, default: Any = MISSING) -> Any:
    """A dataclass field read by `read`; required if it has no default."""
    return field(default=default, metadata={"read": read})


def number(low: float = 0.0, high: float = math.inf, above: bool = False) -> Reader:
    """A reader of finite numbers from `low` (or `above` it) to `high`."""
    must_be = f"a number {'above' if above else 'of at least'} {low:g}" + (
        f" and at most {high:g}" if high < math.inf else ""
    )

    def read(name: str, value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not low <= value <= high or (above and value == low):
            raise refusal(name, value, must_be)
        return float(value)

    return read


def count(low: int = 0) -> Reader:
    """A reader of whole numbers from `low`."""

    def read(name: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise refusal(name, value, f"a whole number of at least {low}")
        return value

    return read


def text(name: str, value: Any) -> str:
    """Read a non-empty text."""
    if not isinstance(value, str) or not value:
        raise refusal(name, value, "a text that is not empty")
    return value


def choice(*names: str) -> Reader:
    """A reader of one of these texts."""

    def read(name: str, value: Any) -> str:
        if value not in names:
            raise refusal(name, value, f"one of {', '.join(names)}")
        return str(value)

    return read


def optional(read: Reader) -> Reader:
    """A reader of null as None, else by `read`."""
    return lambda name, value: None if value is None else read(name, value)


def part(kind: type[Part]) -> Reader:
    """A reader of a JSON object as this dataclass."""
    return lambda name, value: read_part(kind, name, value)


def parts(kind: type[Part]) -> Reader:
    """A reader of a JSON list of objects as a tuple of this dataclass."""

    def read(name: str, value: Any) -> tuple[Part, ...]:
        if not isinstance(value, list):
            raise refusal(name, value, "a list of objects")
        return tuple(read_part(kind, f"{name}[{index}]", each) for index, each in enumerate(value))

    return read


def read_part(kind: type[Part], name: str, value: Any) -> Part:
    """Read a dataclass whose fields are `described` from a JSON object with the same keys.

    Raises:
        ConfigError: names a key that is unknown or missing, or whose value is invalid.
    """
    if not isinstance(value, dict):
        raise refusal(name or "profile", value, "an object")
    known = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    prefix = f"{name}." if name else ""
    for key in value:
        if key not in known:
            raise refusal(f"{prefix}{key}", value[key], f"left out or one of {', '.join(known)}")
    for key, each in known.items():
        if each.default is MISSING and key not in value:
            raise ConfigError(f"{prefix}{key}: missing; must be given")
    return kind(**{key: known[key].metadata["read"](prefix + key, each) for key, each in value.items()})


def curve(name: str, value: Any) -> tuple[tuple[float, float], ...]:
    """Read points [rows, seconds] of a non-decreasing curve with ascending rows."""
    if not isinstance(value, list) or not all(isinstance(point, list) and len(point) == 2 for point in value):
        raise refusal(name, value, "a list of points [rows, seconds]")
    read = number()
    points = [(read(f"{name}[{i}][0]", x), read(f"{name}[{i}][1]", y)) for i, (x, y) in enumerate(value)]
    for index, ((rows, seconds), (next_rows, next_seconds)) in enumerate(itertools.pairwise(points), 1):
        if next_rows <= rows:
            raise refusal(f"{name}[{index}][0]", next_rows, f"above the rows before it, {rows:g}")
        if next_seconds < seconds:
            raise refusal(f"{name}[{index}][1]", next_seconds, f"at least the seconds before it, {seconds:g}")
    if len(points) == 1:
        raise refusal(name, value, "empty, or of two points or more")
    return tuple(points)
