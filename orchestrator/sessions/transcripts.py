"""The index's records of a session after each round."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from bough.protocol.same_fields import like
from bough.protocol.sampling_params import SamplingParams
from bough.registry.records import RequestRecord, SessionRecord
from orchestrator.sessions.session import Session


def session_record(session: Session, target_id: str) -> SessionRecord:
    """The session's place and tokens."""
    lengths = {"target_length": session.target_held, "draft_length": session.draft_held}
    return like(SessionRecord, session, target_id=target_id, tokens=session.tokens[:], **lengths)


def as_recorded(sampling: SamplingParams) -> SamplingParams:
    """Sampling parameters with a hash in place of a grammar, as it may be long and every round is recorded."""
    digest = hashlib.blake2b(sampling.grammar.encode(), digest_size=12).hexdigest() if sampling.grammar else ""
    return replace(sampling, grammar=digest)


def request_record(session: Session) -> RequestRecord:
    """The state of the session's request."""
    sampling = as_recorded(session.sampling)
    return like(RequestRecord, session, tokens=session.tokens[:], sampling=sampling, keeps_session=session.keep)
