"""Parsers of the replies of the scripts in `bough/registry/lua`; other replies raise ValueError or TypeError."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from bough.registry.records import Claim, RequestRecord, SessionRecord, StoredSession, WorkerRecord

# Replies of writing scripts other than 1, as in prelude.lua.
STALE, INCOMPLETE, FULL = -1, 0, -2

Answer = TypeVar("Answer")
Entry = TypeVar("Entry", SessionRecord, RequestRecord)


class QuotaExceeded(NamedTuple):
    """The entries that must be evicted before a new one has room."""

    names_and_ends: tuple[bytes, ...]  # name and expiry in milliseconds, alternating

    @property
    def names(self) -> tuple[bytes, ...]:
        return self.names_and_ends[::2]


def read_unless_full(read: Callable[[Any], Answer], answer: Any) -> Answer | QuotaExceeded:
    """QuotaExceeded if the reply says so, otherwise the reply parsed by `read`."""
    if isinstance(answer, list) and answer and answer[0] == FULL:
        if not all(isinstance(value, bytes) for value in answer[1:]):
            raise ValueError(f"must be names of entries, got {answer!r}")
        return QuotaExceeded(tuple(answer[1:]))
    return read(answer)


def read_claim(session_id: str, answer: Any) -> Claim | None:
    """The claim; None if it was refused, or there is no session to close."""
    if answer in (STALE, INCOMPLETE):
        return None
    epoch, *entry = answer
    return Claim(int(epoch), read_entry(SessionRecord, session_id, entry))


def read_stored(session_id: str, answer: Sequence[bytes | None]) -> StoredSession:
    """Parse a session and its newest epoch."""
    *entry, epoch = answer
    return StoredSession(read_entry(SessionRecord, session_id, entry), int(epoch or 0))


def read_entry(kind: type[Entry], name: str, entry: Sequence[bytes | None]) -> Entry | None:
    """Parse a session or request from its stored record and tokens."""
    data, transcript, *_ = entry
    return kind.from_json(name, data or b"", transcript or b"")


def read_workers(answer: Sequence[bytes]) -> list[WorkerRecord]:
    """Worker records sorted by id; malformed ones are skipped."""
    records = [record for value in answer if (record := WorkerRecord.from_json(value)) is not None]
    return sorted(records, key=lambda record: record.worker_id)


def read_blocks(worker_ids: Sequence[str], answer: Sequence[Any]) -> dict[str, int]:
    """Numbers of blocks by worker id, without zeros."""
    return {worker_id: int(number) for worker_id, number in zip(worker_ids, answer, strict=True) if number}
