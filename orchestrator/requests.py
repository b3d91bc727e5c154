"""Requests from admission to release: what a front door calls, whatever it speaks."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import replace

from bough import __version__
from bough.acceptance import SchemeAcceptance
from bough.config import OrchestratorConfig
from bough.errors import BoughError, Exhausted, InvalidRequest, NotFound, Unavailable
from bough.generation import (
    ChatPrompt,
    Event,
    GenerateOptions,
    Loads,
    ModelInfo,
    Prompt,
    ServerInfo,
    Started,
    TextPrompt,
    TokenPrompt,
    Tokens,
)
from bough.growth import BestFirst, Scheme
from bough.messages import PROTOCOL_VERSION
from bough.sampling import SamplingParams, StopConditions
from bough.tokenizer import Tokenizer
from bough.wire import require_tokens
from orchestrator.acceptance import AcceptanceCounter
from orchestrator.admission import Admission
from orchestrator.directory import Directory, Known
from orchestrator.limits import require_names, require_room, require_size, require_sizes
from orchestrator.patience import Patience
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
        self.admission = Admission(config.max_running, config.max_waiting)
        self._queue_timeout = config.queue_timeout
        self._recorder = Recorder(directory.registry)
        planner = FixedPlanner(BestFirst(config.budget, config.width, config.depth))
        self._rounds = Rounds(config, directory, planner, self._recorder, AcceptanceCounter())
        self._planner = planner
        self._running: dict[str, Session] = {}
        self._endings: set[asyncio.Task[None]] = set()
        self._num_total = 0
        self._num_tokens = 0

    async def generate(
        self, prompt: Prompt, options: GenerateOptions, timeout_seconds: float | None = None
    ) -> AsyncGenerator[Event]:
        """The events of one request, which waits for its turn first. Closed half-way it frees all that it holds.

        Raises:
            InvalidRequest: naming the field.
            Unavailable: the target does not answer, or this orchestrator takes its leave.
            Exhausted: there are too many requests, or the target has no room; with a delay.
            DeadlineExceeded: `timeout_seconds` are over.
        """
        patience = Patience.of(timeout_seconds, self._queue_timeout)
        async with aclosing(patience.bound(self._placed(prompt, options, patience))) as events:
            async for event in events:
                yield event

    async def _placed(self, prompt: Prompt, options: GenerateOptions, patience: Patience) -> AsyncGenerator[Event]:
        """The request, once it has its place."""
        async with self.admission.place(patience), aclosing(self._run(prompt, options, patience)) as events:
            try:
                async for event in events:
                    yield event
            except Exhausted as exc:  # a target's: how long places are held is known here
                raise self.admission.exhausted(str(exc)) from exc

    async def _run(self, prompt: Prompt, options: GenerateOptions, patience: Patience) -> AsyncGenerator[Event]:
        target, session = await self._admit(prompt, options)
        session.patience = patience
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
        """What is running now. A request that waits for a KV slot has a place, and waits all the same."""
        at_target, admission = self._rounds.num_waiting, self.admission
        return Loads(
            len(self._running) - at_target,
            admission.num_waiting + at_target,
            self._num_total,
            self._num_tokens,
            admission.max_running,
            admission.max_waiting,
            admission.wait_seconds,
            admission.is_closed,
        )

    async def settled(self) -> None:
        """Waits until what ended requests held has been freed."""
        await asyncio.gather(*self._endings, return_exceptions=True)

    def acceptance(self) -> tuple[SchemeAcceptance, ...]:
        """What verification has come to, by scheme, depth and rank."""
        return self._rounds.acceptance.counts()

    async def _admit(self, prompt: Prompt, options: GenerateOptions) -> tuple[Known[TargetClient], Session]:
        """Checks everything about a request that can be checked before it runs."""
        require_names(options)
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
        require_size(prompt, target.tokens, target.info.max_context)
        tokens = _encode(prompt, target.tokens, target.info.vocab_size)
        require_room(tokens, target.info.max_context)
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
    require_sizes(options.speculation, target.info.max_nodes)
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


def _common_length(left: tuple[int, ...], right: list[int]) -> int:
    """Length of the common prefix."""
    for index, (mine, theirs) in enumerate(zip(left, right, strict=False)):
        if mine != theirs:
            return index
    return min(len(left), len(right))
