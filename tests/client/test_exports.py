"""What a caller of `Client` can give and get has a name in `bough.client`."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import typing
from collections.abc import Iterator

import bough.client
from bough import errors
from bough.client import Client

NOT_SENT = {"ReasoningMarks", "Channels", "VerifiedTree"}  # of fields that only the orchestrator sets for its HTTP API


def own_types(hint: object) -> Iterator[type]:
    """The classes of bough that an annotation names."""
    if isinstance(hint, type) and hint.__module__.startswith("bough") and hint.__name__ not in NOT_SENT:
        yield hint
    for inner in typing.get_args(hint):
        yield from own_types(inner)


def annotations(owner: object) -> dict[str, object]:
    return typing.get_type_hints(owner)


def reachable() -> set[type]:
    """Classes in the signatures of `Client`'s public methods, and in the fields of those."""
    found: set[type] = {Client}
    methods = [member for name, member in inspect.getmembers(Client) if not name.startswith("_")] + [Client.__init__]
    functions = [member.fget if isinstance(member, property) else member for member in methods]
    new = {one for function in functions for hint in annotations(function).values() for one in own_types(hint)}
    while new := new - found:
        found |= new
        new = {
            one for owner in new if is_value(owner) for hint in annotations(owner).values() for one in own_types(hint)
        }
    return found


def is_value(kind: type) -> bool:
    return not issubclass(kind, enum.Enum) and (dataclasses.is_dataclass(kind) or issubclass(kind, tuple))


def test_all_types_in_the_clients_signatures_are_exported() -> None:
    missing = {kind for kind in reachable() if getattr(bough.client, kind.__name__, None) is not kind}
    assert not missing
    assert {kind.__name__ for kind in reachable()} <= set(bough.client.__all__)


def test_errors_that_callers_can_handle_are_exported() -> None:
    kinds = (errors.InvalidRequest, errors.Exhausted, errors.Unavailable, errors.NotFound, errors.DeadlineExceeded)
    others = (errors.BoughError, errors.ContextExceeded, errors.AlreadyRunning, errors.StaleEpoch, errors.NoAnswer)
    for error in (*kinds, *others, errors.Unauthenticated, errors.ConfigError):
        assert getattr(bough.client, error.__name__) is error


def test_exported_names_exist_and_are_sorted() -> None:
    assert sorted(bough.client.__all__) == bough.client.__all__
    assert all(hasattr(bough.client, name) for name in bough.client.__all__)
