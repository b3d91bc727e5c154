"""Records of the index as plain values, and their stored bytes.

Stored bytes are not trusted: a malformed record reads as None.
"""

from __future__ import annotations

import json
from collections import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

from bough.errors import InvalidRequest
from bough.protocol.ids import ScopedId
from bough.protocol.prefix_hash import prefix_hash
from bough.protocol.sampling_params import SamplingParams, StopConditions

MAX_EPOCH = 2**53  # microseconds, until the year 2255; exact in the doubles of Lua
MAX_TOKEN = 2**31
TOKEN_BYTES = 4  # transcripts are little-endian int32

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """The load of a worker; zeros if it does not report one."""

    kv_bytes: int = 0  # capacity of the KV cache
    kv_used_bytes: int = 0


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
        return _encode(_fields(self))

    @classmethod
    def from_json(cls, data: bytes) -> WorkerRecord | None:
        """Parse a record; None if malformed."""
        return _read(data, lambda stored: _parsed(cls, stored))


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session's tokens, and where its KV probably is."""

    session_id: ScopedId
    target_id: str
    draft_id: str
    epoch: int
    target_length: int  # tokens that the target is believed to have cached
    draft_length: int  # the same for the draft
    tokens: Sequence[int]
    born_us: int = 0  # start of its first request, in microseconds on the clock of epochs
    model_name: str = ""  # public name
    model_identity: str = ""  # of the targets at which the session may continue
    weights_hash: str = ""  # of those targets; empty if unknown

    def to_json(self) -> str:
        """All fields except the id, with the tokens' length and hash instead of the tokens."""
        return _sealed(self, "session_id")

    @classmethod
    def from_json(cls, session_id: ScopedId, data: bytes, transcript: bytes) -> SessionRecord | None:
        """Parse a record; None if malformed, or if the transcript does not match its length and hash."""

        def read(stored: Mapping[str, Any]) -> SessionRecord:
            return _parsed(cls, stored, session_id=session_id, tokens=_unsealed(stored, transcript))

        return _read(data, read)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A running or finished request, with everything needed to resume it or to repeat its end."""

    request_id: ScopedId
    session_id: ScopedId
    epoch: int
    prompt_length: int
    tokens: Sequence[int]  # prompt and output
    sampling: SamplingParams
    stops: StopConditions
    finish_reason: str = ""  # empty while it runs
    stop_reason: str = ""
    target_identity: str = ""  # of the targets that produce the same tokens
    keeps_session: bool = True  # the client named the session, so it outlives the request
    weights_hash: str = ""  # of those targets; empty if unknown

    def to_json(self) -> str:
        """All fields except the id, with the tokens' length and hash instead of the tokens."""
        return _sealed(self, "request_id")

    @classmethod
    def from_json(cls, request_id: ScopedId, data: bytes, transcript: bytes) -> RequestRecord | None:
        """Parse a record; None if malformed, or if the transcript does not match its length and hash."""

        def read(stored: Mapping[str, Any]) -> RequestRecord:
            tokens = _unsealed(stored, transcript)
            _plain(int, stored["prompt_length"], len(tokens) + 1)
            seed = _plain(int, stored["sampling"]["seed"], 2**64)
            sampling = _parsed(SamplingParams, stored["sampling"], seed=seed)
            sampling.validate(MAX_TOKEN)
            return _parsed(cls, stored, request_id=request_id, tokens=tokens, sampling=sampling)

        return _read(data, read)


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim of a session under a new epoch; writes of earlier epochs are refused."""

    epoch: int
    record: SessionRecord | None  # the last record of the session
    is_granted: bool = True  # false if the epoch is from a local clock, which the index does not enforce


class StoredSession(NamedTuple):
    """The index's records of a session."""

    record: SessionRecord | None
    epoch: int  # the newest that was granted


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """The bytes of a transcript."""
    return np.asarray(tokens, dtype="<i4").tobytes()


def _sealed(record: SessionRecord | RequestRecord, id_name: str) -> str:
    stored = _fields(record)
    del stored[id_name], stored["tokens"]
    stored |= {"num_tokens": len(record.tokens), "prefix_hash": prefix_hash(record.tokens)}
    return _encode(stored)


def _fields(value: Any) -> Any:
    """Fields of a dataclass without the copies that `asdict` would make in each round; a set's elements, sorted; or a
    session's id as text.
    """
    if isinstance(value, ScopedId):
        return str(value)
    names = getattr(value, "__dataclass_fields__", None)
    return sorted(value) if names is None else {name: getattr(value, name) for name in names}


_encode = json.JSONEncoder(default=_fields).encode


def _unsealed(stored: Mapping[str, Any], transcript: bytes) -> tuple[int, ...]:
    """The tokens of a transcript; raises ValueError if it does not match the record's length and hash."""
    size = TOKEN_BYTES * _plain(int, stored["num_tokens"], MAX_TOKEN)
    if len(transcript) != size:
        raise ValueError(f"transcript: must be {size} bytes, got {len(transcript)}")
    tokens = tuple(np.frombuffer(transcript, dtype="<i4").tolist())
    if prefix_hash(tokens) != stored["prefix_hash"] or min(tokens, default=0) < 0:
        raise ValueError("transcript: tokens do not match the recorded hash")
    return tokens


def _parsed(kind: type[Value], stored: Mapping[str, Any], **known: Any) -> Value:
    """A dataclass from its stored fields; missing fields get their defaults."""
    if not isinstance(stored, dict):
        raise ValueError(f"must be an object, got {stored!r}")
    hints = get_type_hints(kind)
    read = {name: _checked(hints[name], stored[name]) for name in hints if name in stored and name not in known}
    return kind(**read, **known)


def _checked(hint: Any, value: Any) -> Any:
    """A stored value converted to a field's annotated type. Raises ValueError, TypeError or AttributeError."""
    parts = get_args(hint)
    if NoneType in parts:
        return None if value is None else _checked(parts[0], value)
    match get_origin(hint) or hint:
        case origin if origin in (tuple, frozenset):
            return origin(_checked(parts[0], one) for one in value)
        case abc.Mapping:
            return {parts[0](key): _checked(parts[1], one) for key, one in value.items()}
        case kind if kind in (str, int, float, bool):
            return _plain(kind, value)
        case kind if kind is ScopedId:
            return ScopedId.parse(_plain(str, value))
        case kind:
            return _parsed(kind, value)


def _read(data: bytes, make: Callable[[Mapping[str, Any]], Value]) -> Value | None:
    try:
        return make(json.loads(data))
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError, InvalidRequest):
        return None


def _plain(kind: type, value: Any, limit: int = MAX_EPOCH) -> Any:
    """A valid text, boolean, integer from 0 to below `limit`, or number. Raises ValueError."""
    if type(value) not in ((int, float) if kind is float else (kind,)):
        raise ValueError(f"must be of type {kind.__name__}, got {value!r}")
    if kind is int and not 0 <= value < limit:
        raise ValueError(f"must be an integer from 0 to {limit - 1}, got {value!r}")
    if kind is str:
        value.encode()  # raises for unpaired surrogates
    return kind(value)
