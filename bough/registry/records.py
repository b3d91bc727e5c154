"""Records of the index as plain values, and their stored bytes.

Stored bytes are not trusted: a malformed record reads as None.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import Field, TypeAdapter

from bough.errors import InvalidRequest
from bough.protocol.prefix_hash import prefix_hash
from bough.protocol.sampling_params import SamplingParams, StopConditions

MAX_EPOCH = 2**53  # microseconds, until the year 2255; exact in the doubles of Lua
MAX_TOKEN = 2**31
TOKEN_BYTES = 4  # transcripts are little-endian int32

Value = TypeVar("Value")
Count = Annotated[int, Field(ge=0, lt=MAX_EPOCH)]


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """The load of a worker; zeros if it does not report one."""

    kv_bytes: Count = 0  # capacity of the KV cache
    kv_used_bytes: Count = 0


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A registered process."""

    kind: str  # "draft", "target" or "orchestrator"
    worker_id: str
    address: str  # host:port
    load: WorkerLoad = WorkerLoad()
    metrics: str = ""  # host:port of /metrics; empty if not served

    def to_json(self) -> str:
        """The format that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, data: bytes) -> WorkerRecord | None:
        """Parse a record; None if malformed."""
        return _read(data, lambda stored: _parsed(cls, stored))


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session's tokens, and where its KV probably is."""

    session_id: str
    target_id: str
    draft_id: str
    epoch: Count
    target_length: Count  # tokens that the target is believed to have cached
    draft_length: Count  # the same of the draft
    tokens: Sequence[int]
    born_us: Count = 0  # start of its first request, in microseconds on the clock of epochs
    model_name: str = ""  # public name
    model_identity: str = ""  # of the targets at which the session may continue
    weights_hash: str = ""  # of those targets; empty if unknown

    def to_json(self) -> str:
        """All fields but the id, with the length and hash of the tokens in their place."""
        return _sealed(self, "session_id")

    @classmethod
    def from_json(cls, session_id: str, data: bytes, transcript: bytes) -> SessionRecord | None:
        """Parse a record; None if malformed, or if the transcript does not match its length and hash."""

        def read(stored: Mapping[str, Any]) -> SessionRecord:
            record = _parsed(cls, {**stored, "session_id": session_id, "tokens": ()})
            return replace(record, tokens=_unsealed(stored, transcript))

        return _read(data, read)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request, running or finished, with all that is needed to resume it or to repeat its end."""

    request_id: str
    session_id: str
    epoch: Count
    prompt_length: Count
    tokens: Sequence[int]  # prompt and output
    sampling: SamplingParams
    stops: StopConditions
    finish_reason: str = ""  # empty while it runs
    stop_reason: str = ""
    target_identity: str = ""  # of the targets that produce the same tokens
    keeps_session: bool = True  # the client named the session, so it outlives the request
    weights_hash: str = ""  # of those targets; empty if unknown

    def to_json(self) -> str:
        """All fields but the id, with the length and hash of the tokens in their place."""
        return _sealed(self, "request_id")

    @classmethod
    def from_json(cls, request_id: str, data: bytes, transcript: bytes) -> RequestRecord | None:
        """Parse a record; None if malformed, or if the transcript does not match its length and hash."""

        def read(stored: Mapping[str, Any]) -> RequestRecord:
            record = _parsed(cls, {**stored, "request_id": request_id, "tokens": ()})
            tokens = _unsealed(stored, transcript)
            if record.prompt_length > len(tokens):
                raise ValueError(f"prompt_length: must be at most {len(tokens)}, got {record.prompt_length}")
            record.sampling.validate(MAX_TOKEN)
            record.stops.validate(least_tokens=0)
            return replace(record, tokens=tokens)

        return _read(data, read)


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim of a session under a new epoch; writes of earlier epochs are refused."""

    epoch: int
    record: SessionRecord | None  # the last record of the session
    is_granted: bool = True  # false if the epoch is from a local clock, which the index does not enforce


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """The bytes of a transcript."""
    return np.asarray(tokens, dtype="<i4").tobytes()


def _sealed(record: SessionRecord | RequestRecord, id_name: str) -> str:
    stored = asdict(replace(record, tokens=()))
    del stored[id_name], stored["tokens"]
    stored |= {"num_tokens": len(record.tokens), "prefix_hash": prefix_hash(record.tokens)}
    return json.dumps(stored, default=sorted)  # a set


def _unsealed(stored: Mapping[str, Any], transcript: bytes) -> tuple[int, ...]:
    """The tokens of a transcript; raises ValueError if it does not match the record's length and hash."""
    tokens = tuple(np.frombuffer(transcript, dtype="<i4").tolist())
    is_whole = len(tokens) == stored["num_tokens"] and prefix_hash(tokens) == stored["prefix_hash"]
    if not is_whole or min(tokens, default=0) < 0:
        raise ValueError("transcript: tokens do not match the recorded length and hash")
    return tokens


def _parsed(kind: type[Value], stored: Mapping[str, Any]) -> Value:
    """A dataclass from its stored fields; what is not there has its default. Raises ValueError."""
    return _reader(kind).validate_json(json.dumps(stored), strict=True)


@cache
def _reader(kind: type[Value]) -> TypeAdapter[Value]:
    return TypeAdapter(kind)


def _read(data: bytes, make: Callable[[Mapping[str, Any]], Value]) -> Value | None:
    try:
        return make(json.loads(data))
    except (ValueError, TypeError, LookupError, RecursionError, InvalidRequest):
        return None
