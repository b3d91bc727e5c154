"""The index's records of a session after each round."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from bough.protocol.sampling_params import SamplingParams
from bough.registry.records import RequestRecord, SessionRecord
from orchestrator.sessions.session import Session


def session_record(session: Session, target_id: str) -> SessionRecord:
    """The session's place and tokens."""
    return SessionRecord(
        session.session_id,
        target_id,
        session.draft_id,
        session.epoch,
        session.target_held,
        session.draft_held,
        session.tokens[:],
        session.born_us,
        session.model_name,
        session.model_identity,
        session.weights_hash,
    )


def as_recorded(sampling: SamplingParams) -> SamplingParams:
    """Sampling parameters with a hash in place of a grammar, as it may be long and every round is recorded."""
    digest = hashlib.blake2b(sampling.grammar.encode(), digest_size=12).hexdigest() if sampling.grammar else ""
    return replace(sampling, grammar=digest)


def request_record(session: Session) -> RequestRecord:
    """The state of the session's request."""
    return RequestRecord(
        session.request_id,
        session.session_id,
        session.epoch,
        session.prompt_length,
        session.tokens[:],
        as_recorded(session.sampling),
        session.stops,
        session.finish_reason,
        session.stop_reason,
        session.target_identity,
        session.keep,
        session.weights_hash,
    )
