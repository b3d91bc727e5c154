"""Records of the index as plain values, and their stored bytes.

Stored bytes are not trusted: a malformed record reads as None. Fields that an earlier version did not write are
unknown.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np

from bough.errors import InvalidRequest
from bough.protocol.prefix_hash import prefix_hash
from bough.protocol.sampling_params import SamplingParams, StopConditions

MAX_EPOCH = 2**53  # microseconds, until the year 2255; exact in the doubles of Lua
MAX_TOKEN = 2**31
TOKEN_BYTES = 4  # transcripts are little-endian int32

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """The load of a worker; zeros if it does not report one."""

    num_sessions: int = 0  # sessions with a KV slot
    kv_bytes: int = 0  # capacity of the KV cache
    kv_used_bytes: int = 0
    sweep_seconds: tuple[float, ...] = ()  # minimum, median and maximum of recent sweeps or draft steps


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

        def read(fields: Mapping[str, Any]) -> WorkerRecord:
            load = fields["load"]
            return cls(
                _text(fields["kind"]),
                _text(fields["worker_id"]),
                _text(fields["address"]),
                WorkerLoad(
                    _count(load["num_sessions"]),
                    _count(load["kv_bytes"]),
                    _count(load["kv_used_bytes"]),
                    tuple(_number(seconds) for seconds in load["sweep_seconds"]),
                ),
                _text(fields.get("metrics", "")),  # missing in earlier versions
            )

        return _read(data, read)


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session's tokens, and where its KV probably is."""

    session_id: str
    target_id: str
    draft_id: str
    epoch: int
    target_length: int  # tokens that the target is believed to have cached
    draft_length: int  # the same of the draft
    tokens: Sequence[int]
    born_us: int = 0  # start of its first request, in microseconds on the clock of epochs
    model_name: str = ""  # public name
    model_identity: str = ""  # of the targets at which the session may continue; empty if unknown
    weights_hash: str = ""  # of those targets; empty if unknown

    def to_json(self) -> str:
        """All fields but the id, with the length and hash of the tokens in their place."""
        fields = {name: getattr(self, name) for name in ("target_id", "draft_id", "epoch", "born_us")}
        lengths = {name: getattr(self, name) for name in ("target_length", "draft_length")}
        model = {name: getattr(self, name) for name in ("model_name", "model_identity", "weights_hash")}
        return json.dumps(fields | lengths | model | _seal(self.tokens))

    @classmethod
    def from_json(cls, session_id: str, data: bytes, transcript: bytes) -> SessionRecord | None:
        """Parse a record; None if malformed, or if the transcript does not match its length and hash."""

        def read(fields: Mapping[str, Any]) -> SessionRecord:
            return cls(
                session_id,
                _text(fields["target_id"]),
                _text(fields["draft_id"]),
                _count(fields["epoch"]),
                _count(fields["target_length"]),
                _count(fields["draft_length"]),
                _unsealed(fields, transcript),
                _count(fields.get("born_us", fields["epoch"])),
                _text(fields.get("model_name", "")),
                _text(fields.get("model_identity", "")),
                _text(fields.get("weights_hash", "")),
            )

        return _read(data, read)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request, running or finished, with all that is needed to resume it or to repeat its end."""

    request_id: str
    session_id: str
    epoch: int
    prompt_length: int
    tokens: Sequence[int]  # prompt and output
    sampling: SamplingParams
    stops: StopConditions
    finish_reason: str = ""  # empty while it runs
    stop_reason: str = ""
    target_identity: str = ""  # of the targets that produce the same tokens; empty if unknown
    keeps_session: bool = True  # the client named the session, so it outlives the request
    weights_hash: str = ""  # of those targets; empty if unknown

    def to_json(self) -> str:
        """All fields but the id, with the length and hash of the tokens in their place."""
        fields = {name: getattr(self, name) for name in ("session_id", "epoch", "prompt_length")}
        ends = {
            name: getattr(self, name) for name in ("finish_reason", "stop_reason", "target_identity", "weights_hash")
        }
        sampling = asdict(self.sampling) | {"stop_token_ids": sorted(self.sampling.stop_token_ids)}
        rest = {"sampling": sampling, "stops": asdict(self.stops), "keeps_session": self.keeps_session}
        return json.dumps(fields | ends | rest | _seal(self.tokens))

    @classmethod
    def from_json(cls, request_id: str, data: bytes, transcript: bytes) -> RequestRecord | None:
        """Parse a record; None if malformed, or if the transcript does not match its length and hash."""

        def read(fields: Mapping[str, Any]) -> RequestRecord:
            tokens = _unsealed(fields, transcript)
            return cls(
                request_id,
                _text(fields["session_id"]),
                _count(fields["epoch"]),
                _count(fields["prompt_length"], len(tokens) + 1),
                tokens,
                _sampling(fields["sampling"]),
                StopConditions(
                    _count(fields["stops"]["max_tokens"]), tuple(_text(text) for text in fields["stops"]["stop"])
                ),
                _text(fields["finish_reason"]),
                _text(fields["stop_reason"]),
                _text(fields.get("target_identity", "")),
                _flag(fields.get("keeps_session", True)),
                _text(fields.get("weights_hash", "")),
            )

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


def _seal(tokens: Sequence[int]) -> dict[str, int]:
    return {"num_tokens": len(tokens), "prefix_hash": prefix_hash(tokens)}


def _unsealed(fields: Mapping[str, Any], transcript: bytes) -> tuple[int, ...]:
    """The tokens of a transcript; raises ValueError if it does not match the record's length and hash."""
    size = TOKEN_BYTES * _count(fields["num_tokens"], MAX_TOKEN)
    if len(transcript) != size:
        raise ValueError(f"transcript: must be {size} bytes, got {len(transcript)}")
    tokens = tuple(np.frombuffer(transcript, dtype="<i4").tolist())
    if prefix_hash(tokens) != fields["prefix_hash"] or min(tokens, default=0) < 0:
        raise ValueError("transcript: tokens do not match the recorded hash")
    return tokens


def _sampling(fields: Mapping[str, Any]) -> SamplingParams:
    numbers = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    logprobs = fields["logprobs"]
    sampling = SamplingParams(
        **{name: _number(fields[name]) for name in numbers},
        top_k=_count(fields["top_k"]),
        seed=_count(fields["seed"], 2**64),
        logit_bias={int(token): _number(bias) for token, bias in fields["logit_bias"].items()},
        logprobs=None if logprobs is None else _count(logprobs),
        stop_token_ids=frozenset(_count(token) for token in fields["stop_token_ids"]),
    )
    sampling.validate(MAX_TOKEN)
    return sampling


def _read(data: bytes, make: Callable[[Mapping[str, Any]], Value]) -> Value | None:
    try:
        return make(json.loads(data))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, InvalidRequest):
        return None


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must be text, got {value!r}")
    value.encode()  # raises for unpaired surrogates, which could not be sent
    return value


def _count(value: object, limit: int = MAX_EPOCH) -> int:
    if type(value) is not int or not 0 <= value < limit:
        raise ValueError(f"must be an integer from 0 to {limit - 1}, got {value!r}")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, got {value!r}")
    return value


def _number(value: object) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"must be a number, got {value!r}")
    return float(value)  # type: ignore[arg-type]  # mypy does not follow `type(...) in`
