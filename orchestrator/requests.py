"""Requests from admission to release: what a front door calls, whatever it speaks."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import replace

from bough import __version__
from bough.acceptance import SchemeAcceptance
from bough.config import OrchestratorConfig
from bough.errors import BoughError, Exhausted, InvalidRequest, NotFound, StaleEpoch
from bough.generation import Event, GenerateOptions, Loads, ModelInfo, Prompt, ServerInfo, Started
from bough.growth import BestFirst
from bough.messages import PROTOCOL_VERSION
from bough.sizing.decision import Decision, DraftCalibration
from orchestrator.acceptance import AcceptanceCounter
from orchestrator.admission import Admission
from orchestrator.claims import Claims
from orchestrator.directory import Directory, Known
from orchestrator.failover import Failover
from orchestrator.limits import require_names
from orchestrator.metrics import Figures
from orchestrator.opening import Opened, Opening
from orchestrator.patience import Patience
from orchestrator.recorder import Recorder
from orchestrator.round import Rounds
from orchestrator.running import Running, Stream
from orchestrator.seat import Seat
from orchestrator.session import Session, never_begun
from orchestrator.sizing.fixed_sizer import FixedSizer
from orchestrator.sizing.plans import Sizer
from orchestrator.sizing.totals import MeasuredSizer
from orchestrator.sizing.tree_sizer import TreeSizer
from orchestrator.tokenizing import Tokenizing
from orchestrator.workers import DraftClient, TargetClient

logger = logging.getLogger(__name__)

MAX_NAMES = 256  # requests whose sessions are remembered, to tell of their decisions


class Requests:
    """Everything that is being generated."""

    def __init__(self, config: OrchestratorConfig, directory: Directory, holder_id: str) -> None:
        """`holder_id` names this orchestrator where it claims sessions."""
        self.directory = directory
        self.admission = Admission(config.max_running, config.max_waiting)
        self._queue_timeout = config.queue_timeout
        self._claims = Claims(directory, holder_id)
        self._recorder = Recorder(directory.registry)
        self._opening = Opening(config, directory, self._recorder, self._claims)
        self.sizer = MeasuredSizer(_sizer(config))
        self._failover = Failover(config, directory, self._claims)
        self._rounds = Rounds(config, directory, self.sizer, self._failover, self._recorder, AcceptanceCounter())
        self._running = Running()
        self._endings: dict[str, asyncio.Task[None]] = {}  # by session
        self._sessions: OrderedDict[str, str] = OrderedDict()  # that the last requests ran in, by request
        self.tokenizing = Tokenizing(directory)
        self.metrics_url = ""  # where its figures are served
        self.http_url = ""  # where OpenAI's clients are served
        self._model_name = ""  # of the target that was used last
        self._num_total = 0
        self._num_tokens = 0

    async def generate(
        self, prompt: Prompt, options: GenerateOptions, timeout_seconds: float | None = None
    ) -> AsyncGenerator[Event]:
        """The events of one request, which waits for its turn first. Closed half-way it frees all that it holds.

        Raises:
            InvalidRequest: naming the field.
            NotFound: the session that it continues.
            Unavailable: no target answers, or this orchestrator takes its leave.
            Exhausted: there are too many requests, or no target has room; with a delay.
            StaleEpoch: another has gone on with the request or its session.
            DeadlineExceeded: `timeout_seconds` are over.
        """
        require_names(options)
        options = replace(options, request_id=options.request_id or uuid.uuid4().hex)
        patience = Patience.of(timeout_seconds, self._queue_timeout)
        takes_over = options.resume is not None
        with self._running.admitted(options.request_id, options.session_id, takes_over) as stream:
            async with aclosing(patience.bound(self._placed(stream, prompt, options, patience))) as events:
                async for event in events:
                    yield event

    async def _placed(
        self, stream: Stream, prompt: Prompt, options: GenerateOptions, patience: Patience
    ) -> AsyncGenerator[Event]:
        """The request, once it has its place. What ends it while it waits for that ends it at once."""
        async with AsyncExitStack() as place:
            opened = await stream.before_end(self._open(place, prompt, options, patience))
            if opened is None:
                for event in never_begun(options):
                    yield event
                return
            try:
                async with aclosing(self._stream(stream, opened)) as events:
                    async for event in events:
                        yield event
            except Exhausted as exc:  # a target's: how long places are held is known here
                raise self.admission.exhausted(str(exc)) from exc
            finally:
                self._num_total += 1

    async def _open(
        self, place: AsyncExitStack, prompt: Prompt, options: GenerateOptions, patience: Patience
    ) -> Opened:
        """A session that may run, once there is a place for it, which is free again when `place` is closed."""
        await place.enter_async_context(self.admission.place(patience))
        opened = await self._opening.open(prompt, options)
        opened.session.patience = patience
        await self._ended(opened.session.session_id)
        return opened

    async def _stream(self, stream: Stream, opened: Opened) -> AsyncGenerator[Event]:
        session = opened.session
        with Seat(opened.target) as seat:
            rounds = self._rounds.run(session, seat)
            try:
                num_seen = session.num_replayed - len(opened.unseen.token_ids if opened.unseen else ())
                self._note(session, model_name := seat.target.info.model_name)
                yield Started(session.request_id, session.prompt_length, session.sampling.seed, model_name, num_seen)
                if opened.unseen is not None:
                    yield opened.unseen
                while (tokens := await stream.before_end(anext(rounds, None))) is not None:
                    self._num_tokens += len(tokens.token_ids)
                    yield tokens
                if not session.is_finished:
                    session.finish_reason = "abort"
                    self._rounds.record(session, seat.target)
                if self.directory.index_problem:
                    session.warn(f"{self.directory.index_problem}; the session is not recorded")
                elif session.keep:  # the next turn may be asked of another orchestrator
                    await self._recorder.settled(session.session_id)
                yield session.finished()
            except StaleEpoch as exc:
                stream.end(exc)
                raise
            finally:
                await rounds.aclose()
                self.sizer.forget(session.session_id)
                if session.keep or stream.is_superseded:
                    self._recorder.end(session.session_id)
                elif session.epoch:
                    self._begin_forgetting(session, seat.target)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """After the block, when no stream runs any more, cleans up what they have left, as far as anyone answers."""
        try:
            yield
        finally:
            while self._endings:
                await asyncio.wait({*self._endings.values()})
            await self._recorder.close()

    def abort(self, request_id: str) -> None:
        """Ends a request at once. Raises NotFound."""
        self._running.request(request_id).end()

    async def close_session(self, session_id: str) -> None:
        """Forgets a session, here and at its workers; a request that runs in it ends.

        Raises:
            NotFound: nobody knows it.
            Unavailable: the index does not answer, and nothing is known here.
        """
        if not session_id:
            raise InvalidRequest("session_id: empty; the session to close would do")
        stream = self._running.in_session(session_id)
        if stream is not None:
            stream.end(StaleEpoch(f"session_id: {session_id!r} was closed"))
        await self._recorder.settled(session_id)
        record = await self.directory.registry.load_session(session_id)
        if record is None and stream is None:
            raise NotFound(f"session_id: {session_id!r} is not known")
        claim = await self._claims.begin(session_id)
        self._recorder.drop(session_id, claim.epoch)
        for worker_id in (record.target_id, record.draft_id) if record is not None else ():
            await self._release(session_id, claim.epoch, self.directory.find(worker_id))
        await self._recorder.settled(session_id)

    def models(self) -> tuple[ModelInfo, ...]:
        """The models that are served. Raises Unavailable."""
        return (self.model_info(),)

    @property
    def is_ready(self) -> bool:
        """Whether a request that came now could be served."""
        return self.directory.has_target and not self.admission.is_closed

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
            metrics_url=self.metrics_url,
        )

    def loads(self) -> Loads:
        """What is running now. A request that waits for a KV slot has a place, and waits all the same."""
        admission = self.admission
        num_waiting = self._num_waiting
        return Loads(
            len(self._running) - num_waiting,
            num_waiting,
            self._num_total,
            self._num_tokens,
            admission.max_running,
            admission.max_waiting,
            admission.wait_seconds,
            admission.is_closed,
        )

    @property
    def _num_waiting(self) -> int:
        return self.admission.num_waiting + self._failover.num_waiting

    def figures(self) -> Figures:
        """What is told to Prometheus; any thread."""
        num_waiting = self._num_waiting
        num_running = len(self._running) - num_waiting
        return Figures(self._model_name, num_running, num_waiting, self._num_tokens, self.sizer.totals)

    def acceptance(self) -> tuple[SchemeAcceptance, ...]:
        """What verification has come to, by scheme, depth and rank."""
        return self._rounds.acceptance.counts()

    def decisions(self, name: str) -> Sequence[Decision]:
        """The last rounds of a session, oldest first, by its name or by that of a request that ran in it.

        Of the session last at work where the name is empty.

        Raises:
            NotFound: nothing is remembered of it.
        """
        decisions = self.sizer.decisions(name) or self.sizer.decisions(self._sessions.get(name, name))
        if not decisions:
            raise NotFound(f"session_id: value was {name!r}; must be a session, or a request, with rounds here lately")
        return decisions

    def calibrations(self) -> tuple[DraftCalibration, ...]:
        """What each draft worker's trees were expected to come to, and what they came to."""
        return self.sizer.calibrations()

    def _note(self, session: Session, model_name: str) -> None:
        self._model_name = model_name
        self._sessions[session.request_id] = session.session_id
        if len(self._sessions) > MAX_NAMES:
            self._sessions.popitem(last=False)

    def _begin_forgetting(self, session: Session, target: Known[TargetClient]) -> None:
        """A stream that ends, however it ends, does not wait for the cleaning up."""
        task = asyncio.create_task(self._forget(session, target))
        self._endings[session.session_id] = task
        task.add_done_callback(lambda _: self._forget_ending(session.session_id, task))

    def _forget_ending(self, session_id: str, task: asyncio.Task[None]) -> None:
        if self._endings.get(session_id) is task:  # a stream that resumed it may have ended since
            del self._endings[session_id]

    async def _ended(self, session_id: str) -> None:
        """Waits until what an earlier stream of the session has left is cleaned up."""
        if session_id in self._endings:
            await asyncio.wait({self._endings[session_id]})

    async def _forget(self, session: Session, target: Known[TargetClient]) -> None:
        await self._recorder.settled(session.session_id)  # its request is still to be known
        self._recorder.drop(session.session_id, session.epoch)
        for worker in (target, self.directory.find(session.draft_id)):
            await self._release(session.session_id, session.epoch, worker)

    async def _release(
        self, session_id: str, epoch: int, worker: Known[TargetClient] | Known[DraftClient] | None
    ) -> None:
        if worker is not None:
            with suppress(BoughError):  # gone, never held, or somebody else's by now: nothing to free
                await worker.client.release(session_id, epoch)


def _sizer(config: OrchestratorConfig) -> Sizer:
    """As the settings say."""
    size = BestFirst(config.budget, config.width, config.depth)
    if config.planner == "fixed":
        return FixedSizer(size, config.sweep_nodes)
    return TreeSizer(size, config.max_depth)
