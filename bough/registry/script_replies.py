"""Replies of the scripts in `bough/registry/lua`, as values. Any other reply raises ValueError or TypeError."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from bough.registry.records import Claim, RequestRecord, SessionRecord, WorkerRecord

# What a script that writes answers beside 1, as in prelude.lua.
STALE, INCOMPLETE, FULL = -1, 0, -2

Answer = TypeVar("Answer")


class Crowded(NamedTuple):
    """An entry has no room until these have gone."""

    names_and_ends: tuple[bytes, ...]  # of each its name, and the millisecond at which it ends anyway

    @property
    def names(self) -> tuple[bytes, ...]:
        return self.names_and_ends[::2]


def read_crowded(read: Callable[[Any], Answer], answer: Any) -> Answer | Crowded:
    """What `read` makes of it, unless it tells that there is no room."""
    if isinstance(answer, list) and answer and answer[0] == FULL:
        if not all(isinstance(value, bytes) for value in answer[1:]):
            raise ValueError(f"{answer!r} names no entries")
        return Crowded(tuple(answer[1:]))
    return read(answer)


def read_claim(session_id: str, answer: Any) -> Claim | None:
    """None where it is refused."""
    if answer == STALE:
        return None
    epoch, *entry = answer
    return Claim(int(epoch), read_session(session_id, entry))


def read_closed(session_id: str, answer: Any) -> Claim | None:
    """None where nobody had it."""
    return None if answer == INCOMPLETE else read_claim(session_id, answer)


def read_session(session_id: str, entry: Sequence[bytes | None]) -> SessionRecord | None:
    """From its record and its tokens."""
    data, transcript = entry
    return SessionRecord.from_json(session_id, data or b"", transcript or b"")


def read_request(request_id: str, entry: Sequence[bytes | None]) -> RequestRecord | None:
    """From its record and its tokens."""
    data, transcript = entry
    return RequestRecord.from_json(request_id, data or b"", transcript or b"")


def read_workers(answer: Sequence[bytes]) -> list[WorkerRecord]:
    """By their names; what is no record is passed over."""
    records = [record for value in answer if (record := WorkerRecord.from_json(value)) is not None]
    return sorted(records, key=lambda record: record.worker_id)


def read_blocks(worker_ids: Sequence[str], answer: Sequence[Any]) -> dict[str, int]:
    """Numbers of blocks by worker; none of them is 0."""
    return {worker_id: int(number) for worker_id, number in zip(worker_ids, answer, strict=True) if number}
