"""What the scripts in `bough/lua` answer, as values. Raises ValueError or TypeError for what none of them would say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bough.records import Claim, RequestRecord, SessionRecord, WorkerRecord

# What a script that writes answers beside 1.
STALE, INCOMPLETE = -1, 0


def read_claim(session_id: str, answer: Any) -> Claim | None:
    """None where it is refused."""
    if answer == STALE:
        return None
    epoch, *entry = answer
    return Claim(int(epoch), read_session(session_id, entry))


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


def read_holder(answer: Sequence[Any]) -> tuple[str, int] | None:
    """Of the workers that hold the longest prefix the one with fewest sessions, and its number of blocks."""
    num_blocks, *holders = answer
    workers = read_workers(holders)
    return (min(workers, key=lambda worker: worker.load.num_sessions).worker_id, int(num_blocks)) if workers else None
