"""Requests from admission to release: what a front door calls, whatever it speaks."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace

from bough import __version__
from bough.acceptance import SchemeAcceptance
from bough.calibration import DraftCalibration
from bough.config import OrchestratorConfig
from bough.errors import BoughError, InvalidRequest, NotFound, Unavailable
from bough.generation import (
    ChatPrompt,
    Event,
    GenerateOptions,
    Loads,
    ModelInfo,
    Prompt,
    ServerInfo,
    Speculation,
    Started,
    TextPrompt,
    TokenPrompt,
    Tokens,
)
from bough.growth import BestFirst, Chains, Scheme, StaticShape, require_growth
from bough.messages import PROTOCOL_VERSION
from bough.sampling import SamplingParams, StopConditions
from bough.tokenizer import Tokenizer
from bough.wire import require_tokens
from orchestrator.acceptance import AcceptanceCounter
from orchestrator.directory import Directory, Known
from orchestrator.planner import FixedPlanner
from orchestrator.recorder import Recorder
from orchestrator.round import Rounds
from orchestrator.session import Session
from orchestrator.text import TextStream
from orchestrator.workers import TargetClient

logger = logging.getLogger(__name__)


class Requests:
    """Everything that is being generated."""

    def __init__(self, config: OrchestratorConfig, directory: Directory) -> None:
        self.directory = directory
        self._recorder = Recorder(directory.registry)
        planner = FixedPlanner(BestFirst(config.budget, config.width, config.depth))
        self._rounds = Rounds(config, directory, planner, self._recorder, AcceptanceCounter())
        self._planner = planner
        self._running: dict[str, Session] = {}
        self._endings: set[asyncio.Task[None]] = set()
        self._num_total = 0
        self._num_tokens = 0

    async def generate(self, prompt: Prompt, options: GenerateOptions) -> AsyncIterator[Event]:
        """The events of one request.

        Raises:
            InvalidRequest: naming the field.
            Unavailable, Exhausted: the target does not answer, or has no room.
        """
        target, session = await self._admit(prompt, options)
        self._running[session.request_id] = session
        self._recorder.begin(session.session_id)
        target.num_running += 1
        rounds = self._rounds.run(session, target)
        try:
            yield Started(session.request_id, session.prompt_length, session.sampling.seed, target.info.model_name)
            while (tokens := await _next_or_abort(rounds, session)) is not None:
                self._num_tokens += len(tokens.token_ids)
                yield tokens
            if self.directory.index_problem:
                session.warn(f"{self.directory.index_problem}; the session is not recorded")
            yield session.finished()
        except Unavailable:
            target.report(is_fault=True)
            raise
        finally:
            await rounds.aclose()  # type: ignore[attr-defined]
            target.num_running -= 1
            self._num_total += 1
            del self._running[session.request_id]
            self._end_in_background(session, target)

    def abort(self, request_id: str) -> None:
        """Ends a request at once. Raises NotFound."""
        session = self._running.get(request_id)
        if session is None:
            raise NotFound(f"request_id: {request_id!r} is not running")
        session.aborted.set()

    def model_info(self) -> ModelInfo:
        """The model that is served. Raises Unavailable."""
        target = self.directory.target()
        info = target.info
        return ModelInfo(
            info.model_name,
            info.model_description,
            info.model_fingerprint,
            info.tokenizer_fingerprint,
            info.vocab_size,
            info.max_context,
            target.tokenizer.eos_token_ids,
        )

    def server_info(self) -> ServerInfo:
        """This orchestrator and its workers."""
        return ServerInfo(
            self.directory.statuses(),
            self.directory.index_problem,
            self.directory.registry.safe_url,
            PROTOCOL_VERSION,
            __version__,
            is_draftless=self._rounds.config.draft == "none",
        )

    def loads(self) -> Loads:
        """What is running now."""
        return Loads(len(self._running), self._rounds.num_waiting, self._num_total, self._num_tokens)

    def acceptance(self) -> tuple[SchemeAcceptance, ...]:
        """What verification has come to, by scheme, depth and rank."""
        return self._rounds.acceptance.counts()

    def calibrations(self) -> tuple[DraftCalibration, ...]:
        """What each draft worker's trees were expected to come to, and what they came to."""
        return self._rounds.calibrations.reports()

    async def _admit(self, prompt: Prompt, options: GenerateOptions) -> tuple[Known[TargetClient], Session]:
        """Checks everything about a request that can be checked before it runs."""
        record = None
        if options.session_id:
            await self._recorder.settled(options.session_id)
            with suppress(Unavailable):  # without the index the whole prompt is computed again
                record = await self.directory.registry.load_session(options.session_id)
        # From here to the return nothing is awaited: no other request can come in between.
        if options.session_id and any(s.session_id == options.session_id for s in self._running.values()):
            raise InvalidRequest(f"session_id: {options.session_id!r} has a request running; wait for its end")
        target = self.directory.target(record.target_id if record else "")
        if options.request_id in self._running:
            raise InvalidRequest(f"request_id: {options.request_id!r} is already running; another would do")
        tokens = _encode(prompt, target.tokens, target.info.vocab_size)
        _require_room(tokens, target.info.max_context)
        session = _session(tokens, options, target)
        if record is not None:
            common = _common_length(record.tokens, tokens)
            is_same = record.target_id == target.record.worker_id
            session.target_held = max(0, min(record.target_length, common)) if is_same else 0
            session.draft_held = max(0, min(record.draft_length, common))
            session.epoch = max(session.epoch, record.epoch + 1)
        return target, session

    def _end_in_background(self, session: Session, target: Known[TargetClient]) -> None:
        """A stream that ends, however it ends, does not wait for the cleaning up."""
        self._planner.forget(session.session_id)
        ending = self._recorder.end(session.session_id) if session.keep else self._release(session, target)
        task = asyncio.create_task(ending)
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    async def _release(self, session: Session, target: Known[TargetClient]) -> None:
        self._recorder.drop(session.session_id)
        draft = self.directory.draft(target)
        for client in (target.client, draft.client if draft else None):
            if client is not None:
                with suppress(BoughError):  # gone, or never held: nothing to free
                    await client.release(session.session_id)


async def _next_or_abort(rounds: AsyncIterator[Tokens], session: Session) -> Tokens | None:
    """The next round's tokens; None at the end, which an abort brings about at once."""
    round_task = asyncio.ensure_future(anext(rounds, None))
    abort_task = asyncio.ensure_future(session.aborted.wait())
    try:
        await asyncio.wait((round_task, abort_task), return_when=asyncio.FIRST_COMPLETED)
        if round_task.done():
            return round_task.result()
        session.finish_reason = "abort"
        return None
    finally:
        abort_task.cancel()
        if not round_task.done():
            round_task.cancel()
            with suppress(asyncio.CancelledError, BoughError):
                await round_task


def _encode(prompt: Prompt, tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    match prompt:
        case TextPrompt(text):
            tokens = tokenizer.encode(text)
        case ChatPrompt(messages):
            if not messages:
                raise InvalidRequest("chat.messages: empty; at least one message would do")
            tokens = tokenizer.encode_chat([(message.role, message.content) for message in messages])
        case TokenPrompt(token_ids):
            require_tokens("token_ids.ids", token_ids, vocab_size)
            tokens = list(token_ids)
    if not tokens:
        raise InvalidRequest("prompt: empty; at least one token would do")
    return tokens


def _require_room(tokens: list[int], max_context: int) -> None:
    if len(tokens) >= max_context:
        raise InvalidRequest(
            f"prompt: {len(tokens)} tokens; the context holds {max_context}, of which at least one is for the output"
        )


def _session(tokens: list[int], options: GenerateOptions, target: Known[TargetClient]) -> Session:
    own_ends = () if options.ignore_eos else target.tokenizer.eos_token_ids
    sampling = SamplingParams(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=secrets.randbits(64) if options.seed is None else options.seed,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        logit_bias=options.logit_bias,
        logprobs=options.logprobs,
        stop_token_ids=frozenset((*options.stop_token_ids, *own_ends)),
    )
    sampling.validate(target.info.vocab_size)
    stops = StopConditions(options.max_tokens, options.stop)
    stops.validate()
    _require_sizes(options.speculation, target.info.max_nodes)
    return Session(
        request_id=options.request_id or uuid.uuid4().hex,
        session_id=options.session_id or uuid.uuid4().hex,
        keep=bool(options.session_id),
        tokens=tokens,
        prompt_length=len(tokens),
        sampling=sampling,
        stops=stops,
        # Without chance all schemes keep the same tokens, and the target's own can have the likeliest guesses.
        speculation=replace(options.speculation, scheme=Scheme.TARGET) if sampling.is_greedy else options.speculation,
        text=TextStream(target.tokens.decode, options.stop),
        max_context=target.info.max_context,
        epoch=time.time_ns(),  # grows from one placement to the next without asking anyone
    )


def _require_sizes(speculation: Speculation, max_nodes: int) -> None:
    for name in ("budget", "width", "depth"):
        value = getattr(speculation, name)
        if value is not None and not 1 <= value <= max_nodes:
            raise InvalidRequest(f"speculation.{name}: {value}; 1 to {max_nodes} would do")
    if speculation.lookup is not None and not 0 <= speculation.lookup <= max_nodes:
        raise InvalidRequest(f"speculation.lookup: {speculation.lookup}; 0 to {max_nodes} would do")
    if speculation.growth is not None:
        require_growth("speculation.growth", speculation.growth, max_nodes)
    if speculation.scheme is not Scheme.TARGET and not isinstance(speculation.growth, StaticShape | Chains):
        raise InvalidRequest(
            f"speculation.scheme: {speculation.scheme.value} verifies samples, and growing best first takes none; "
            "growth by a shape or in chains would do"
        )


def _common_length(left: tuple[int, ...], right: list[int]) -> int:
    """Length of the common prefix."""
    for index, (mine, theirs) in enumerate(zip(left, right, strict=False)):
        if mine != theirs:
            return index
    return min(len(left), len(right))
