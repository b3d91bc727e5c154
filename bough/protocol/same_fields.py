"""Values made from others that have the same fields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

Value = TypeVar("Value")


def like(kind: type[Value], source: object, **own: Any) -> Value:
    """A dataclass with these fields of its `own`, and all others as `source` has them under the same names.

    A field that means something else in `source` must be among its `own`.
    """
    return kind(**{name: getattr(source, name) for name in _names(kind) if name not in own}, **own)


_names: Callable[[Any], tuple[str, ...]] = cache(lambda kind: tuple(field.name for field in fields(kind)))
