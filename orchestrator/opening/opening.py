"""From a client's request to a session that can run: tokens, target and epoch."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from bough.config.processes import OrchestratorConfig
from bough.errors import InvalidRequest, NotFound, StaleEpoch, Unavailable
from bough.protocol.codec import require_tokens
from bough.protocol.codec_fields import like
from bough.protocol.generation import GenerateOptions, Prompt, Resume, Tokens, WorkerInfo, weights_differ
from bough.protocol.ids import ScopedId
from bough.protocol.prefix_hash import BLOCK_TOKENS, TokenHistory, block_hashes, common_length, whole_blocks
from bough.protocol.sampling_params import MAX_LOGPROBS, SamplingParams, StopConditions
from bough.registry.records import RequestRecord, SessionRecord
from bough.tokenization.tokenizer import Tokenizer
from bough.trees.tree_plan import Scheme
from orchestrator.admission.active_streams import Stream
from orchestrator.admission.size_limits import require_room, require_size, require_sizes
from orchestrator.cluster.directory import Directory
from orchestrator.cluster.served_models import TargetWaiting, targets_for
from orchestrator.cluster.target_place import TargetPlace
from orchestrator.cluster.worker_handle import Need, TargetHandle, Targets
from orchestrator.opening.epochs import Epochs
from orchestrator.opening.prompt import OutputForm, continued_prompt, next_prompt, output_form, whole_prompt
from orchestrator.opening.recorder import Recorder, as_recorded, lost_turn, request_record
from orchestrator.reasoning.formats import reasoning_of
from orchestrator.sessions.detokenizer import TextStream
from orchestrator.sessions.session import Session


class Opened(NamedTuple):
    """A session that may run, unless it is finished already."""

    session: Session
    place: TargetPlace
    unseen: Tokens | None  # generated before the client's stream broke, and not received


class _Past(NamedTuple):
    """What the index records of a request and its session; may be out of date."""

    request: RequestRecord | None
    session: SessionRecord | None
    is_unwritten: bool = False  # the session's state comes from this orchestrator; the index does not have it yet

    def of_model(self, info: WorkerInfo) -> _Past:
        """The record without the session, if that belongs to another model."""
        session = self.session
        is_same = session is not None and session.model_identity == info.model_identity
        if session is None or not is_same or weights_differ(session.weights_hash, info.weights_hash):
            return self._replace(session=None)
        return self

    @property
    def weights_hash(self) -> str:
        """Hash of the weights that the session or request began with; empty if unknown."""
        records = (self.request, self.session)
        return next((record.weights_hash for record in records if record is not None and record.weights_hash), "")


class _Made(NamedTuple):
    """The tokens of the prompt that was read last."""

    prompt: Prompt
    tokenizer: Tokenizer
    vocab_size: int
    tokens: list[int]


@dataclass(slots=True)
class Opening:
    """Checks everything about a request that can be checked before it runs."""

    config: OrchestratorConfig
    directory: Directory
    recorder: Recorder
    claims: Epochs
    waiting: TargetWaiting
    _made: _Made | None = None

    async def open(self, prompt: Prompt, options: GenerateOptions, stream: Stream) -> Opened:
        """Open the session of a stream's request. The stream gets a place at a target, among its resources.

        Raises:
            InvalidRequest: names the invalid field.
            NotFound: the session to continue, or the model, is unknown.
            Unavailable: no target with the model can be used, or the index, needed to continue, does not answer.
            StaleEpoch: another request is continuing the same session.
        """
        past, targets = await self.waiting.once_there(partial(self._past_and_targets, options, stream), stream.deadline)
        past = past.of_model(targets[0].info)
        largest = max(targets, key=lambda known: known.info.max_context)
        if options.resume is not None:
            require_resume(options.resume, largest.info.vocab_size)
        limits = largest.info.max_context, largest.info.context_limit
        require_size(prompt, largest.tokenizer, *limits)
        tokens = await self.directory.tokenizing.run(lambda: TokenHistory(self._tokens(prompt, options, past, largest)))
        require_room(tokens, *limits)
        reasoning = reasoning_of(prompt, tokens, largest.tokenizer, self.config.reasoning_parser)
        form = await output_form(prompt, options, largest.tokenizer, self.config.tool_call_parser, reasoning)
        need = await self._need(tokens, options, past.session, targets)
        target = _quickest(targets, need)
        # Before any wait: concurrent requests must see each other.
        place = stream.resources.enter_context(TargetPlace(target))
        session, unseen = _session(stream, tokens, options, form, target, past.request), None
        session.weights_hash, session.reasoning = past.weights_hash or target.info.weights_hash, reasoning
        # Without other knowledge, assume that everything is cached: if not, a small first tree costs little.
        cached = need.held.get(target.record.worker_id, 0) if need.knows_held else len(tokens)
        session.target_cached = min(cached, whole_blocks(len(tokens) - 1))
        if options.resume is not None:
            if past.request is not None:
                require_same_request(past.request, session)
            unseen = resume(session, options, options.resume, past.request)
        if not session.is_finished:
            await self._claim(session, options, past, place)
        return Opened(session, place, unseen)

    async def _past_and_targets(self, options: GenerateOptions, stream: Stream) -> tuple[_Past, Targets]:
        past = await self._past(options, stream)
        return past, targets_for(self.directory, options, past.request, past.session)

    async def _past(self, options: GenerateOptions, stream: Stream) -> _Past:
        """Records of the request and session, including unwritten ones. Without the index none can be continued."""
        request, session, is_unwritten = None, None, False
        try:
            if options.resume is not None:
                request = await self.directory.registry.load_request(stream.request_id)
            session_id = _session_id(stream, request)
            if session_id:
                await self.recorder.until_written(session_id)
                session = self.recorder.unwritten(session_id, options.continues and request is None)
                is_unwritten = session is not None
                stored = await self.directory.registry.stored_session(session_id)
                if session is None or (stored.record is not None and stored.record.epoch > session.epoch):
                    session, is_unwritten = stored.record, False
                if options.continues and request is None and session is not None and stored.epoch > session.epoch:
                    raise lost_turn(session_id)  # a turn has begun since, here or at another orchestrator
        except Unavailable as exc:
            if options.continues and session is None:
                raise _not_now(options, exc) from exc
        if session is not None and time.time() - session.born_us / 1e6 > self.config.session_max_seconds:
            session = None
        return _Past(request, session, is_unwritten)

    def _tokens(self, prompt: Prompt, options: GenerateOptions, past: _Past, target: TargetHandle) -> list[int]:
        """The prompt's tokens, including the session that it continues; a resumed request's are in its record."""
        if not options.continues:
            return self._whole(prompt, target.tokenizer, target.info.vocab_size)
        if not options.session_id:
            raise InvalidRequest("session_id", "must be given with continues true")
        if past.request is not None:
            tokens = list(past.request.tokens[: past.request.prompt_length])
            new = next_prompt(prompt, target.tokenizer, target.info.vocab_size)
            return tokens if tokens[-len(new) :] == new else new  # another prompt, which is refused as such
        if options.resume is not None and options.resume.num_tokens > 0:
            raise NotFound(
                "request_id",
                f"{options.request_id!r} is not known any more, and neither is its session; "
                "send the full history, with continues false",
            )
        if past.session is None or not past.session.tokens:
            raise NotFound(
                "session_id",
                f"{options.session_id!r} is not known (any more); send the full history, with continues false",
            )
        if max(past.session.tokens) >= target.info.vocab_size:
            other = "is another model's; send the full history, with continues false"
            raise NotFound("session_id", f"{options.session_id!r} {other}")
        return continued_prompt(past.session.tokens, prompt, target.tokenizer, target.info.vocab_size)

    def _whole(self, prompt: Prompt, tokenizer: Tokenizer, vocab_size: int) -> list[int]:
        """Tokens of a prompt that begins a text; the choices of a call, which have the same object, share them.

        Choices that ask at the same moment, in several threads, each compute them.
        """
        made = self._made  # several threads set it
        if made is None or made.prompt is not prompt or (made.tokenizer, made.vocab_size) != (tokenizer, vocab_size):
            tokens = whole_prompt(prompt, tokenizer, vocab_size)
            made = self._made = _Made(prompt, tokenizer, vocab_size, tokens)
        return made.tokens

    async def _need(
        self, tokens: TokenHistory, options: GenerateOptions, session: SessionRecord | None, targets: Targets
    ) -> Need:
        """What a request needs from a target, and the tokens that targets already hold."""
        held, home_id, knows_held = {}, "", True
        if session is not None and any(target.record.worker_id == session.target_id for target in targets):
            home_id = session.target_id
            held[home_id] = min(session.target_length, common_length(session.tokens, tokens))
        elif self.directory.index_problem:
            knows_held = False
        elif len(tokens) > BLOCK_TOKENS:
            hashes = await self.directory.tokenizing.run(lambda: block_hashes(tokens, cache_salt=options.cache_salt))
            fingerprint, names = targets[0].info.model_fingerprint, [known.record.worker_id for known in targets]
            await self.recorder.prefixes_noted()  # the next turn may come at once
            try:
                blocks = await self.directory.registry.find_prefixes(fingerprint, hashes, names)
                held = {name: num_blocks * BLOCK_TOKENS for name, num_blocks in blocks.items()}
            except Unavailable:
                knows_held = False
        return Need(len(tokens), options.max_tokens, held, home_id, knows_held)

    async def _claim(self, session: Session, options: GenerateOptions, past: _Past, place: TargetPlace) -> None:
        """Claim the session; its last known KV at workers is assumed to be there until they report otherwise.

        The claim shows other orchestrators that the recorded turn is not the last one. Raises Unavailable if the
        session continues from the index, and the claim cannot be written.
        """
        record, claim = past.session, await self.claims.begin(session.session_id)
        if options.continues and past.request is None and not (claim.is_granted or past.is_unwritten):
            raise _not_now(options, "the index cannot be written")
        session.before = record
        session.epoch = session.born_us = claim.epoch
        session.has_claim = claim.is_granted
        if record is not None:
            session.epoch, session.born_us = max(claim.epoch, record.epoch + 1), record.born_us
            session.has_claim = claim.is_granted and claim.epoch > record.epoch
            common = common_length(record.tokens, session.tokens)
            held = min(common, len(session.tokens) - 1)  # the last token is the root, which is never cached
            if record.target_id == place.target.record.worker_id:
                place.believe(min(record.target_length, held))
            session.draft_id, session.draft_held = record.draft_id, min(record.draft_length, held)
        if options.continues:
            if claim.record is not None and record is not None and claim.record.epoch > record.epoch:
                raise StaleEpoch(f"session_id: {session.session_id.name!r} was continued by another request meanwhile")
            # Record before anything is generated: a retry must not continue the session twice.
            with suppress(Unavailable):
                await self.directory.registry.record_request(request_record(session), first_new=0)


def _not_now(options: GenerateOptions, reason: object) -> Unavailable:
    return Unavailable(f"session_id: {options.session_id!r} cannot be continued now: {reason}")


def _quickest(targets: Targets, need: Need) -> TargetHandle:
    """The target with the shortest expected time, among those whose context fits the request best.

    Targets no longer listed in the index come last, as they are about to end.
    """
    longest = max(target.info.max_context for target in targets)
    wanted = min(need.num_tokens + need.num_output, longest)
    fitting = [target for target in targets if target.info.max_context >= wanted]
    return min(fitting, key=lambda target: (target.is_leaving, target.expected_seconds(need), target.busyness))


def _session_id(stream: Stream, request: RequestRecord | None) -> ScopedId:
    """The session's id; without a name for a new one."""
    named, recorded = stream.session_id, ScopedId() if request is None else request.session_id
    if named and recorded and named != recorded:
        whose = f"must be that of request_id {stream.request_id.name!r}"
        raise InvalidRequest("session_id", whose, repr(named.name))
    return named or recorded


def _session(
    stream: Stream,
    tokens: TokenHistory,
    options: GenerateOptions,
    form: OutputForm,
    target: TargetHandle,
    request: RequestRecord | None,
) -> Session:
    sampling = _sampling(options, form.grammar, target, request)
    stops = like(StopConditions, options)
    stops.validate(least_tokens=1 if options.prompt_logprobs is None else 0)
    if options.prompt_logprobs is not None and not 0 <= options.prompt_logprobs <= MAX_LOGPROBS:
        raise InvalidRequest("prompt_logprobs", f"must be 0 to {MAX_LOGPROBS}", options.prompt_logprobs)
    if options.prompt_logprobs is not None and target.info.max_nodes == 1:
        raise InvalidRequest("prompt_logprobs", "must be left out, as this target's trees have one node (--max-nodes)")
    if options.min_tokens > options.max_tokens:
        most = f"must be at most max_tokens, {options.max_tokens}"
        raise InvalidRequest("min_tokens", most, options.min_tokens)
    require_sizes(options.speculation, target.info.max_nodes)
    return Session(
        request_id=stream.request_id,
        session_id=_session_id(stream, request) or replace(stream.request_id, name=uuid.uuid4().hex),
        keep=bool(stream.session_id) or (request is not None and request.keeps_session),
        tokens=tokens,
        prompt_length=len(tokens),
        sampling=sampling,
        stops=stops,
        # at temperature 0 all schemes accept the same tokens, and scheme "target" allows the likeliest guesses
        speculation=replace(options.speculation, scheme=Scheme.TARGET) if sampling.is_greedy else options.speculation,
        text=TextStream(
            partial(target.tokenizer.decode_showing, shown=form.shown) if form.shown else target.tokenizer.decode,
            options.stop,
            min_tokens=options.min_tokens,
            include_stop=options.include_stop,
        ),
        max_context=target.info.max_context,
        target_identity=target.info.identity,
        model_name=target.info.model_name,
        model_identity=target.info.model_identity,
        cache_salt=options.cache_salt,
        prompt_logprobs=options.prompt_logprobs,
    )


def _sampling(
    options: GenerateOptions, grammar: str, target: TargetHandle, request: RequestRecord | None
) -> SamplingParams:
    own_ends = () if options.ignore_eos else target.tokenizer.files.eos_token_ids
    seed = options.seed
    if seed is None:
        seed = secrets.randbits(64) if request is None else request.sampling.seed
    ends = frozenset((*options.stop_token_ids, *own_ends))
    sampling = like(SamplingParams, options, seed=seed, stop_token_ids=ends, grammar=grammar)
    sampling.validate(target.info.vocab_size)
    if options.resume is not None and options.resume.num_tokens and options.seed is None and request is None:
        raise InvalidRequest("seed", "must be the one that `started` gave, as the request is resumed", "none")
    return sampling


def require_same_request(record: RequestRecord, session: Session) -> None:
    """Raise InvalidRequest if a resumed request differs from the one that was begun."""
    begun = (record.tokens[: record.prompt_length], record.sampling, record.stops)
    resumed = (tuple(session.tokens[: session.prompt_length]), as_recorded(session.sampling), session.stops)
    for name, was, now in zip(("prompt", "sampling parameters", "stop conditions"), begun, resumed, strict=True):
        if was != now:
            raise InvalidRequest(
                "resume",
                f"request_id {record.request_id.name!r} must have the same {name} as at its start, "
                "with the seed that `started` reported",
            )


def resume(session: Session, options: GenerateOptions, wanted: Resume, record: RequestRecord | None) -> Tokens | None:
    """Bring a new session to its request's state; returns the tokens that the client has not seen, if any.

    The client's account of the tokens that it received is trusted; the index's only if it agrees. Raises
    InvalidRequest if the received tokens are unknown.
    """
    recorded = () if record is None else record.tokens[record.prompt_length :]
    seen = _seen(wanted, recorded, session.request_id.name)
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
