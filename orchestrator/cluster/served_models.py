"""The served models, the choice of targets for a request, and the wait while no target is there.

A request never moves to another model.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeVar

from bough.errors import InvalidRequest, NotFound, Unavailable
from bough.protocol.codec_fields import like
from bough.protocol.generation import GenerateOptions, ModelInfo, WorkerInfo
from bough.registry.records import RequestRecord, SessionRecord
from orchestrator.admission.admission import Admission
from orchestrator.cluster.directory import Directory, other_weights, with_weights
from orchestrator.cluster.worker_handle import TargetHandle, Targets
from orchestrator.sessions.session import Deadline

SHOWN = 64  # limit of characters of an unknown name in errors
POLL_SECONDS = 0.2  # between two looks for a target that is away

Result = TypeVar("Result")


class TargetAway(Unavailable):
    """No target that could serve a request is usable now; one that `would_do` may have been recently."""

    def __init__(self, message: str, would_do: Callable[[WorkerInfo], bool]) -> None:
        super().__init__(message)
        self.would_do = would_do


def served_models(directory: Directory) -> tuple[ModelInfo, ...]:
    """All models that targets serve, by name. Raises Unavailable if there are none."""
    by_model: dict[tuple[str, str], list[TargetHandle]] = {}
    for target in directory.targets:
        by_model.setdefault((target.info.model_name, target.info.model_identity), []).append(target)
    if not by_model:
        raise Unavailable(directory.why_no_target())
    return tuple(_model_info(by_model[key]) for key in sorted(by_model))


def largest_context(directory: Directory) -> int:
    """Tokens of the longest session that any target takes, or took while there were any; 0 if none was ever known."""
    return max((info.max_context for info in _known(directory)), default=0)


def context_limit(directory: Directory) -> str:
    """What keeps the longest session below its model's own limit; empty if nothing does."""
    return max(_known(directory), key=lambda info: info.max_context).context_limit if _known(directory) else ""


def _known(directory: Directory) -> Sequence[WorkerInfo]:
    """The known targets, or the last known ones."""
    return [target.info for target in directory.targets] or [*directory.seen]


def largest_vocabulary(directory: Directory) -> int:
    """Tokens of the largest vocabulary that any target has, or had while there were any."""
    known = [target.info for target in directory.targets] or directory.seen
    return max((info.vocab_size for info in known), default=0)


def targets_for(
    directory: Directory, options: GenerateOptions, request: RequestRecord | None, session: SessionRecord | None
) -> Targets:
    """The usable targets of one model that may serve a request; at least one.

    A resumed request continues at a target that gives the same tokens; one in a session, at one that serves the
    session's model. A request with the whole text may restart a session with another model by naming it.

    Raises:
        InvalidRequest: the named model is not that of the request or session, or none is named and several are served.
        NotFound: no target has served the named model.
        TargetAway: no target that serves the model can be used now.
        Unavailable: the targets that can be used have other weights, or no target has ever been known.
    """
    targets = directory.targets
    if not directory.seen:
        raise Unavailable(directory.why_no_target())
    if request is not None:
        return _begun(targets, options, request)
    if session is not None and (options.continues or not options.model):
        return _continued(targets, options, session)
    served = sorted({target.info.model_name for target in targets})
    if not options.model and len(served) > 1:
        raise InvalidRequest("model", f"must be one of {_listed(served)}, as several models are served", "''")
    named = [target for target in targets if options.model in ("", target.info.model_name)]
    if not named and options.model not in ("", *directory.model_names):
        raise NotFound(
            "model", f"must be one of {_listed(served or sorted(directory.model_names))}", repr(options.model[:SHOWN])
        )
    usable = [target for target in named if target.is_usable]
    if not usable:
        is_any = any(target.is_usable for target in targets)
        why = f"model: no target that serves {options.model!r} can be used now" if is_any else directory.why_no_target()
        raise TargetAway(why, lambda info: options.model in ("", info.model_name))
    if session is not None:
        same = [t for t in usable if t.info.model_identity == session.model_identity]
        usable = list(with_weights(same, session.weights_hash)) or usable
    # If a name stands for several models, as while weights are replaced, choose one of them.
    least = min(usable, key=lambda target: target.busyness)
    same = [target for target in usable if target.info.model_identity == least.info.model_identity]
    return with_weights(same, least.info.weights_hash) or [least]


def _begun(targets: Targets, options: GenerateOptions, request: RequestRecord) -> Targets:
    """The targets that give the resumed request's tokens."""
    same = [target for target in targets if target.info.identity == request.target_identity]
    name = request.request_id.name
    for target in same:
        _require_named(options, target.info.model_name, f"the model that request_id {name!r} began with")
    usable = [target for target in same if target.is_usable]
    if not usable:
        raise TargetAway(
            "no usable target gives the same tokens as the one where the request began",
            lambda info: info.identity == request.target_identity,
        )
    return _with_its_weights(usable, request.weights_hash, f"request_id: {name!r}")


def _with_its_weights(usable: Targets, weights_hash: str, whose: str) -> Targets:
    """The targets with the weights that a request or session began with. Raises Unavailable if there are none."""
    same = with_weights(usable, weights_hash)
    if not same:
        raise Unavailable(f"{whose} cannot continue: {other_weights(usable, weights_hash)}")
    return same


def _continued(targets: Targets, options: GenerateOptions, session: SessionRecord) -> Targets:
    """The targets with a session's model."""
    name = session.session_id.name
    _require_named(options, session.model_name, f"the model of session_id {name!r}")
    usable = [t for t in targets if t.is_usable and t.info.model_identity == session.model_identity]
    if not usable:
        raise TargetAway(
            f"session_id: {name!r} uses the model {session.model_name!r}, and no target that serves "
            "it can be used now; another model takes its full history, with continues false and that model named",
            lambda info: info.model_identity == session.model_identity,
        )
    return _with_its_weights(usable, session.weights_hash, f"session_id: {name!r}")


def _require_named(options: GenerateOptions, model_name: str, whose: str) -> None:
    if options.model not in ("", model_name):
        raise InvalidRequest("model", f"must be {model_name!r}, {whose}", repr(options.model[:SHOWN]))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def _model_info(targets: Targets) -> ModelInfo:
    """The ModelInfo of targets with one model."""
    longest = max(target.info.max_context for target in targets)
    ends = targets[0].tokenizer.files.eos_token_ids
    return like(ModelInfo, targets[0].info, max_context=longest, eos_token_ids=ends)


@dataclass(slots=True)
class TargetWaiting:
    """Makes new requests wait while no target is usable but one is expected back, as during a restart.

    Admission limits the requests with places; `most_held` limits the others.
    """

    directory: Directory
    admission: Admission
    most_seconds: float  # since a target for the request could be used, and since the request began to wait
    most_held: float = inf  # beyond it a request is refused as if no target were expected back
    num_held: int = 0

    async def once_there(self, look: Callable[[], Awaitable[Result]], deadline: Deadline) -> Result:
        """The result of `look` as soon as it does not raise TargetAway; the wait is deducted from the request's budget.

        Raises Unavailable if no target came back in time, or this orchestrator drains and the call has no place.
        """
        try:
            return await look()
        except TargetAway as exc:
            if self.num_held >= self.most_held:
                raise
            away = exc
        self.num_held += 1
        try:
            with deadline.waiting():
                return await self._held(look, away, min(self.most_seconds, deadline.queue_seconds))
        finally:
            self.num_held -= 1

    async def _held(self, look: Callable[[], Awaitable[Result]], away: TargetAway, most_seconds: float) -> Result:
        began = time.monotonic()
        while True:
            last_usable = self.directory.last_usable(away.would_do)
            if time.monotonic() > min(began + most_seconds, last_usable + self.most_seconds):
                raise Unavailable(f"{away}; none came back in time (--failover-timeout, --queue-timeout)") from away
            await asyncio.sleep(POLL_SECONDS)
            if self.most_held < inf:  # no drain waits for those without a place
                self.admission.require_open()
            try:
                return await look()
            except TargetAway as exc:
                away = exc
