"""Going on with a request whose stream broke: what is known of it, and what of that was not seen."""

from __future__ import annotations

from collections.abc import Sequence

from bough.errors import InvalidRequest
from bough.protocol.codec import require_tokens
from bough.protocol.generation import GenerateOptions, Resume, Tokens
from bough.registry.records import RequestRecord
from orchestrator.sessions.session import Session


def require_same_request(record: RequestRecord, session: Session) -> None:
    """Raises InvalidRequest where a request that is resumed is not the one that was begun."""
    begun = (record.tokens[: record.prompt_length], record.sampling, record.stops)
    resumed = (tuple(session.tokens[: session.prompt_length]), session.sampling, session.stops)
    for name, was, now in zip(("prompt", "sampling parameters", "stop conditions"), begun, resumed, strict=True):
        if was != now:
            raise InvalidRequest(
                f"resume: request_id {record.request_id!r} was begun with another {name}; all fields must be as then, "
                "and the seed as `started` gave it"
            )


def resume(session: Session, options: GenerateOptions, wanted: Resume, record: RequestRecord | None) -> Tokens | None:
    """Brings a new session to where its request was; returns what the client has not seen, None for nothing.

    What the client says that it has seen is believed; the index is only where it agrees.

    Raises:
        InvalidRequest: nobody knows what the client has seen.
    """
    recorded = () if record is None else record.tokens[record.prompt_length :]
    seen = _seen(wanted, recorded, session.request_id)
    is_believed = recorded[: len(seen)] == seen and options.logprobs is None  # these are not recorded
    unseen = session.replay(recorded if is_believed and len(recorded) > len(seen) else seen, len(seen))
    if session.num_replayed < len(seen):
        raise InvalidRequest(f"resume.num_tokens: {len(seen)}, but the request ends after {session.num_replayed}")
    if record is not None and record.finish_reason == "abort" and not session.is_finished:
        session.finish_reason = "abort"
    return unseen


def require_resume(wanted: Resume, vocab_size: int) -> None:
    """Raises InvalidRequest for what makes no sense whatever is known."""
    require_tokens("resume.token_ids", wanted.token_ids, vocab_size)
    if wanted.token_ids and len(wanted.token_ids) != wanted.num_tokens:
        raise InvalidRequest(
            f"resume.token_ids: {len(wanted.token_ids)} tokens; {wanted.num_tokens}, as resume.num_tokens says, or "
            "none would do"
        )


def _seen(wanted: Resume, recorded: Sequence[int], request_id: str) -> tuple[int, ...]:
    if wanted.token_ids:
        return wanted.token_ids
    if wanted.num_tokens > len(recorded):
        raise InvalidRequest(
            f"resume.num_tokens: {wanted.num_tokens}, but {len(recorded)} tokens of request_id {request_id!r} are "
            "known; the tokens themselves in resume.token_ids would do"
        )
    return tuple(recorded[: wanted.num_tokens])
