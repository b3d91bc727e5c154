"""What the index holds, as plain values and as the bytes that stand there.

Nothing that is read from the index is believed to be well formed: what cannot be one of our records is None. Fields
that an earlier version did not write may be missing, and are unknown then.
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

MAX_EPOCH = 2**53  # exact in a double, which is what the index computes with; microseconds until the year 2255
MAX_TOKEN = 2**31
TOKEN_BYTES = 4  # transcripts are little-endian int32

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """How busy a worker is; zeros where it does not tell."""

    num_sessions: int = 0  # whose KV it holds
    kv_bytes: int = 0  # that KV may take
    kv_used_bytes: int = 0
    sweep_seconds: tuple[float, ...] = ()  # of its last sweeps or draft steps: shortest, median, longest


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A process that has announced itself."""

    kind: str  # "draft", "target" or "orchestrator"
    worker_id: str
    address: str  # host:port
    load: WorkerLoad = WorkerLoad()
    metrics: str = ""  # host:port of /metrics; empty where none are served

    def to_json(self) -> str:
        """As `from_json` reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, data: bytes) -> WorkerRecord | None:
        """None for what is no such record."""

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
                _text(fields.get("metrics", "")),  # which processes of an earlier version do not tell
            )

        return _read(data, read)


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """Where a session's KV probably is, and its text."""

    session_id: str
    target_id: str
    draft_id: str
    epoch: int
    target_length: int  # tokens that the target is believed to hold
    draft_length: int
    tokens: Sequence[int]
    born_us: int = 0  # microseconds on the clock of epochs: when its first request began
    model_name: str = ""  # as users know it
    model_identity: str = ""  # of the targets at which the session may go on; empty where it is not known
    weights_hash: str = ""  # of these, where it was known

    def to_json(self) -> str:
        """All but the name and the tokens, of which there is the length and the hash."""
        fields = {name: getattr(self, name) for name in ("target_id", "draft_id", "epoch", "born_us")}
        lengths = {name: getattr(self, name) for name in ("target_length", "draft_length")}
        model = {name: getattr(self, name) for name in ("model_name", "model_identity", "weights_hash")}
        return json.dumps(fields | lengths | model | _seal(self.tokens))

    @classmethod
    def from_json(cls, session_id: str, data: bytes, transcript: bytes) -> SessionRecord | None:
        """None for what is no such record, or where the transcript is not the one that it speaks of."""

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
    """One request, running or ended: enough to go on with it, or to tell again how it ended."""

    request_id: str
    session_id: str
    epoch: int
    prompt_length: int
    tokens: Sequence[int]  # prompt and output
    sampling: SamplingParams
    stops: StopConditions
    finish_reason: str = ""  # empty while it runs
    stop_reason: str = ""
    target_identity: str = ""  # of the targets that give the same tokens; empty where it is not known
    keeps_session: bool = True  # the client has named the session, which outlives the request
    weights_hash: str = ""  # of these targets, where it was known

    def to_json(self) -> str:
        """All but the name and the tokens, of which there is the length and the hash."""
        fields = {name: getattr(self, name) for name in ("session_id", "epoch", "prompt_length")}
        ends = {
            name: getattr(self, name) for name in ("finish_reason", "stop_reason", "target_identity", "weights_hash")
        }
        sampling = asdict(self.sampling) | {"stop_token_ids": sorted(self.sampling.stop_token_ids)}
        rest = {"sampling": sampling, "stops": asdict(self.stops), "keeps_session": self.keeps_session}
        return json.dumps(fields | ends | rest | _seal(self.tokens))

    @classmethod
    def from_json(cls, request_id: str, data: bytes, transcript: bytes) -> RequestRecord | None:
        """None for what is no such record, or where the transcript is not the one that it speaks of."""

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
    """A session is the claimant's from now on; whoever had it before is refused."""

    epoch: int
    record: SessionRecord | None  # what was recorded of it before
    is_granted: bool = True  # by the index, and not by a clock in its place: it will refuse whoever has it no longer


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """As they stand in a transcript."""
    return np.asarray(tokens, dtype="<i4").tobytes()


def _seal(tokens: Sequence[int]) -> dict[str, int]:
    return {"num_tokens": len(tokens), "prefix_hash": prefix_hash(tokens)}


def _unsealed(fields: Mapping[str, Any], transcript: bytes) -> tuple[int, ...]:
    """The tokens, if they are the ones that were sealed. A transcript may end later: its record is written after it."""
    size = TOKEN_BYTES * _count(fields["num_tokens"], MAX_TOKEN)
    if len(transcript) != size:
        raise ValueError(f"{len(transcript)} bytes of tokens; {size} are recorded")
    tokens = tuple(np.frombuffer(transcript, dtype="<i4").tolist())
    if prefix_hash(tokens) != fields["prefix_hash"] or min(tokens, default=0) < 0:
        raise ValueError("other tokens than were recorded")
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
        raise ValueError(f"{value!r} is no text")
    value.encode()  # half of a surrogate pair would fail later, on the wire
    return value


def _count(value: object, limit: int = MAX_EPOCH) -> int:
    if type(value) is not int or not 0 <= value < limit:
        raise ValueError(f"{value!r} is no number from 0 to below {limit}")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def _number(value: object) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"{value!r} is no number")
    return float(value)  # type: ignore[arg-type]  # mypy does not follow `type(...) in`
