"""Resuming a request whose stream broke: what is recorded, and what of it the client has not seen."""

from __future__ import annotations

from collections.abc import Sequence

from bough.errors import InvalidRequest
from bough.protocol.codec import require_tokens
from bough.protocol.generation import GenerateOptions, Resume, Tokens
from bough.registry.records import RequestRecord
from orchestrator.opening.recorder import as_recorded
from orchestrator.sessions.session import Session


def require_same_request(record: RequestRecord, session: Session) -> None:
    """Raise InvalidRequest if a resumed request differs from the one that was begun."""
    begun = (record.tokens[: record.prompt_length], record.sampling, record.stops)
    resumed = (tuple(session.tokens[: session.prompt_length]), as_recorded(session.sampling), session.stops)
    for name, was, now in zip(("prompt", "sampling parameters", "stop conditions"), begun, resumed, strict=True):
        if was != now:
            raise InvalidRequest(
                "resume",
                f"request_id {record.request_id!r} must have the same {name} as when it was begun, "
                "with the seed that `started` reported",
            )


def resume(session: Session, options: GenerateOptions, wanted: Resume, record: RequestRecord | None) -> Tokens | None:
    """Bring a new session to its request's state; returns the tokens that the client has not seen, if any.

    The client is trusted about what it has seen; the index only where it agrees. Raises InvalidRequest if what the
    client has seen is unknown.
    """
    recorded = () if record is None else record.tokens[record.prompt_length :]
    seen = _seen(wanted, recorded, session.request_id)
    reports_none = options.logprobs is None and options.prompt_logprobs is None  # log-probabilities are not recorded
    is_believed = recorded[: len(seen)] == seen and reports_none
    unseen = session.replay(recorded if is_believed and len(recorded) > len(seen) else seen, len(seen))
    if session.num_replayed < len(seen):
        most = session.num_replayed
        raise InvalidRequest("resume.num_tokens", f"must be at most {most}, where the request ends", len(seen))
    if record is not None and record.finish_reason == "abort" and not session.is_finished:
        session.finish_reason = "abort"
    return unseen


def require_resume(wanted: Resume, vocab_size: int) -> None:
    """Raise InvalidRequest for contradictory fields."""
    require_tokens("resume.token_ids", wanted.token_ids, vocab_size)
    if wanted.token_ids and len(wanted.token_ids) != wanted.num_tokens:
        raise InvalidRequest(
            "resume.token_ids",
            f"must have {wanted.num_tokens} tokens, as resume.num_tokens says, or none",
            len(wanted.token_ids),
        )


def _seen(wanted: Resume, recorded: Sequence[int], request_id: str) -> tuple[int, ...]:
    if wanted.token_ids:
        return wanted.token_ids
    if wanted.num_tokens > len(recorded):
        raise InvalidRequest(
            "resume.num_tokens",
            f"must be at most {len(recorded)}, the tokens of request_id {request_id!r} that are known",
            f"{wanted.num_tokens}; or send resume.token_ids",
        )
    return tuple(recorded[: wanted.num_tokens])
