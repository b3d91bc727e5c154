"""Requests from admission to release; called by all APIs."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from enum import Enum
from math import inf

from bough import __version__
from bough.config.processes import OrchestratorConfig
from bough.errors import DeadlineExceeded, Exhausted, InvalidRequest, NotFound, StaleEpoch, Unavailable
from bough.protocol.decision import Decision
from bough.protocol.generation import (
    PROTOCOL_VERSION,
    Event,
    GenerateOptions,
    Loads,
    ModelInfo,
    Prompt,
    ServerInfo,
)
from bough.protocol.ids import ScopedId
from bough.telemetry.tracing import CURRENT_SPAN
from bough.trees.scheme_acceptance import SchemeAcceptance
from orchestrator.admission.active_streams import Running, Stream
from orchestrator.admission.admission import Admission, Hold
from orchestrator.admission.call_limiter import CallLimiter
from orchestrator.admission.size_limits import require_size_for_any
from orchestrator.cluster.directory import Directory
from orchestrator.cluster.served_models import TargetWaiting, context_limit, largest_context, served_models
from orchestrator.opening.endings import Endings
from orchestrator.opening.epochs import Epochs
from orchestrator.opening.opening import Opened, Opening
from orchestrator.opening.recorder import Recorder
from orchestrator.rounds.round import PromptScoring, Rounds
from orchestrator.rounds.verifier import Verifier
from orchestrator.serving.model_texts import MOST_HELD, ModelTexts
from orchestrator.sessions.session import Deadline, Session, never_begun
from orchestrator.sizing.totals import AcceptanceCounter, MeasuredSizer
from orchestrator.sizing.tree_sizer import TreeSizer
from orchestrator.telemetry.metrics import Figures, LoopLag
from orchestrator.telemetry.request_watch import RequestTotals, RequestWatch, TroubleCount

MAX_NAMES = 256  # limit of requests whose sessions are remembered, for `decisions`


class Requests:
    """All running requests."""

    def __init__(self, config: OrchestratorConfig, directory: Directory, holder_id: str) -> None:
        """`holder_id` identifies this orchestrator in claims of sessions."""
        self.config, self.directory = config, directory
        self.admission = Admission(config.max_running, config.max_waiting)
        self.totals = RequestTotals()
        self.call_limiter = CallLimiter(self.admission, lambda: largest_context(directory), self.totals.failed)
        self._claims = Epochs(directory, holder_id)
        self.recorder = Recorder(directory.registry)
        waiting = TargetWaiting(directory, self.admission, config.failover_timeout)
        self.opening = Opening(config, directory, self.recorder, self._claims, waiting)
        self.sizer = MeasuredSizer(TreeSizer.of(config))
        self.endings = Endings(directory, self.recorder)
        self._verifier = Verifier(config, directory, self._claims, self.endings)
        self.rounds = Rounds(config, directory, self.sizer, self._verifier, self.recorder, AcceptanceCounter())
        self.loop_lag = LoopLag()
        self.streams = Running()
        self._sessions: OrderedDict[ScopedId, ScopedId] = OrderedDict()  # of the latest requests, by request
        self.texts = ModelTexts(TargetWaiting(directory, self.admission, config.failover_timeout, MOST_HELD), config)
        self.metrics_url = self.http_url = ""  # of this orchestrator, and of its OpenAI-compatible API
        self._model_name = ""  # of the target used last
        self.num_total = self.num_tokens = 0

    def generate(
        self,
        prompt: Prompt,
        options: GenerateOptions,
        timeout_seconds: float | None = None,
        hold: Hold | None = None,
        tenant: str = "",
    ) -> AsyncGenerator[Event]:
        """Yield the events of a request with an id, perhaps with its turn already; closing the generator frees all.

        Raises:
            InvalidRequest: names the invalid field.
            NotFound: the session to continue, or the model, is unknown.
            Unavailable: no target answers, or this orchestrator is draining.
            Exhausted: there are too many requests, or no target has room; has a retry delay.
            AlreadyRunning: the request, or another one of its session, is running.
            StaleEpoch: another call has taken over the request or its session.
            DeadlineExceeded: `timeout_seconds` are over, or the caller has not asked for the next event for as long as
                the configuration allows. The request's resources are free then.
        """
        return RequestRun(self, prompt, options, hold or Hold(), tenant).run(timeout_seconds)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Measure the event loop's lag during the block; afterwards release what streams have left."""
        try:
            async with self.loop_lag.running():
                yield
        finally:
            await self.drain("this orchestrator has ended; ask another orchestrator", 0.0)
            await self.endings.all_done()
            await self.recorder.close()

    async def drain(self, refusal: str, timeout_seconds: float) -> None:
        """Refuse further requests with this text, and let those that run or wait finish in time.

        Requests that do not finish in time end as Unavailable at any API, and their resources are freed.
        """
        self.admission.close(refusal)
        cut_off = Unavailable(f"{refusal}; this call was cut off, and can be resumed there")
        await self.streams.finished_or_cut_off(timeout_seconds, cut_off)

    def abort(self, request_id: ScopedId) -> None:
        """End a request at once. Raises NotFound."""
        self.streams.request(request_id).end()

    async def close_session(self, session_id: ScopedId) -> None:
        """Forget a session, here and at its workers; a running request of it ends. Raises NotFound or Unavailable."""
        if not session_id:
            raise InvalidRequest("session_id", "must be given", "none")
        if (stream := self.streams.in_session(session_id)) is not None:
            stream.close(StaleEpoch(f"session_id: {session_id.name!r} was closed"))
        if not await self.endings.close(session_id) and stream is None:
            raise NotFound("session_id", f"{session_id.name!r} is not known")

    @property
    def is_ready(self) -> bool:
        """Whether a new request could be served."""
        return self.directory.has_target and not self.admission.is_closed

    def models(self) -> tuple[ModelInfo, ...]:
        """The served models by name; at least one. Raises Unavailable."""
        return served_models(self.directory)

    async def server_info(self) -> ServerInfo:
        """This orchestrator, and its workers as they are now."""
        await self.directory.look()
        return ServerInfo(
            self.directory.statuses(),
            self.directory.index_problem,
            self.directory.registry.safe_url,
            PROTOCOL_VERSION,
            __version__,
            is_draftless=self.rounds.config.draft == "none",
            metrics_url=self.metrics_url,
            http_url=self.http_url,
            unreached=self.directory.unreached(),
        )

    def loads(self) -> Loads:
        """Current load. Requests that wait for a target or a KV slot have places, but count as waiting."""
        admission = self.admission
        return Loads(
            *self._counts,
            self.num_total,
            self.num_tokens,
            admission.max_running,
            admission.max_waiting,
            admission.wait_seconds,
        )

    @property
    def _counts(self) -> tuple[int, int]:
        """Requests that run, and that wait for a place, a target or a KV slot."""
        num_held_up = self._verifier.num_waiting + self.opening.waiting.num_held
        return self.admission.num_running - num_held_up, self.admission.num_waiting + num_held_up

    def figures(self) -> Figures:
        """Figures for Prometheus; any thread."""
        return Figures(
            self._model_name,
            *self._counts,
            self.num_tokens,
            self.totals,
            self.sizer.totals,
            self.loop_lag.tally,
            self.loop_lag.num_tasks,
            self.opening.waiting.num_held,
        )

    def acceptance(self) -> tuple[SchemeAcceptance, ...]:
        """Acceptance counts by scheme, depth and rank."""
        return self.rounds.acceptance.counts()

    def decisions(self, known: ScopedId) -> Sequence[Decision]:
        """The last rounds of a session, oldest first, by its id or that of a request in it.

        Without a name they are those of the tenant's session that was active last. Raises NotFound if nothing is
        remembered of it.
        """
        if not (decisions := self.sizer.log.of(known) or self.sizer.log.of(self._sessions.get(known, known))):
            raise NotFound("session_id", "must be a session or request with recent rounds here", repr(known.name))
        return decisions

    def note(self, session: Session, model_name: str) -> None:
        self._model_name = model_name
        self._sessions[session.request_id] = session.session_id
        if len(self._sessions) > MAX_NAMES:
            self._sessions.popitem(last=False)


class Stage(Enum):
    """Of a request's life."""

    ADMITTED = "admitted"  # among the running requests; it waits for its place, and is opened
    SCORING = "scoring"  # its prompt's tokens
    ROUNDS = "rounds"
    ENDED = "ended"


class RequestRun(Stream):
    """One request, from its admission to its end; the next step is taken when its reader asks for an event.

    Its resources are freed in reverse order. After an error they are freed at once, even if the reader has not asked
    for the next event.
    """

    def __init__(self, requests: Requests, prompt: Prompt, options: GenerateOptions, hold: Hold, tenant: str) -> None:
        super().__init__(ScopedId(options.request_id, tenant), ScopedId(options.session_id, tenant), hold)
        self._all, self._prompt, self._options = requests, prompt, options
        self._stage = Stage.ADMITTED
        self._ready: deque[Event] = deque()  # made, not yet read
        self._earlier: Stream | None = None  # of the same request, whose place this one has taken over

    async def run(self, timeout_seconds: float | None) -> AsyncGenerator[Event]:
        """Yield the request's events, as `Requests.generate` says."""
        requests = self._all
        tokenizers = {target.tokenizer for target in requests.directory.targets}
        limits = largest_context(requests.directory), context_limit(requests.directory)
        require_size_for_any(self._prompt, tokenizers, *limits)
        queue_seconds = inf if self.hold.is_further else requests.config.queue_timeout
        self.deadline = Deadline.of(timeout_seconds, queue_seconds)
        watch = RequestWatch(requests.totals)
        try:
            self._admit()
            while self._ready or self._stage is not Stage.ENDED:
                if not self._ready:
                    await self._step()
                    continue
                watch.note(event := self._ready.popleft())
                with self._read_in_time(requests.config.stalled_timeout):
                    yield event
                if self.error is not None:
                    raise self.error
        except BaseException as exc:  # also if its caller leaves
            watch.failed(exc)
            raise
        finally:
            self.free()

    def _admit(self) -> None:
        """Join the running requests; a call of the same request that this one resumes ends."""
        takes_over = self._options.resume is not None
        self._earlier = earlier = self.resources.enter_context(self._all.streams.admitted(self, takes_over))
        place = self._all.admission.holding(self.hold, None if earlier is None else earlier.hold)
        self.resources.enter_context(place)
        if earlier is not None:
            self.supersede(earlier)

    async def _step(self) -> None:
        """Make the next events. Anything that ends the request ends the wait at once."""
        match self._stage:
            case Stage.ADMITTED:
                await self._begin()
            case Stage.SCORING:
                await self._guarded(self._score())
            case Stage.ROUNDS:
                await self._guarded(self._round())

    async def _begin(self) -> None:
        opened = None
        try:
            opened = await self.before_end(self._open())
        finally:
            if self._earlier is not None:
                runs = opened.session if opened is not None and opened.session.epoch else None
                self.takes_over(self._earlier, runs.session_id if runs is not None else ScopedId())
                self._earlier = None
        if opened is None:
            self._ready.extend(never_begun(self._options))
            self._stage = Stage.ENDED
            return
        self._session, self._place, unseen = opened
        session = self._session
        self._troubles = TroubleCount(self._all.totals, session)
        self.resources.callback(self._end_session)
        self._all.note(session, self._place.target.info.model_name)
        self._ready.append(session.started(session.num_replayed - len(unseen.token_ids if unseen else ())))
        if unseen is not None:
            self._ready.append(unseen)
        if session.prompt_logprobs is not None and not session.is_finished:  # else its client has seen them all
            self._scoring = PromptScoring(session, self._place, self._all.rounds.verifier, session.prompt_logprobs)
            self._stage = Stage.SCORING
        else:
            self._begin_rounds()

    async def _open(self) -> Opened:
        """Open a session once there is a place."""
        requests = self._all
        with CURRENT_SPAN.get().child("queue"):
            await requests.admission.place(self.hold, self.deadline)
        with CURRENT_SPAN.get().child("open"):
            await requests.directory.limiter.acquire()
            opened = await requests.opening.open(self._prompt, self._options, self)
        opened.session.deadline, opened.session.trace = self.deadline, CURRENT_SPAN.get()
        await requests.endings.done(opened.session.session_id)
        return opened

    def _begin_rounds(self) -> None:
        self._lookup = self._all.rounds.lookup(self._session, self.resources)
        self._stage = Stage.ROUNDS

    async def _guarded(self, step: Awaitable[None]) -> None:
        """Take a step of the opened session."""
        try:
            await step
        except StaleEpoch as exc:
            self.end(exc)
            raise
        except Exhausted as exc:  # from a target; the retry delay is estimated here
            raise self._all.admission.exhausted(str(exc)) from exc
        finally:
            self._troubles.count()

    async def _score(self) -> None:
        session = self._session
        if (scores := await self.before_end(self._scoring.next())) is None:
            await self._finish()
            return
        self._ready.append(scores)
        if self._scoring.is_over:
            if not session.stops.max_tokens:
                session.finish_reason = "length"
            self._all.rounds.record(session, self._place)
            self._begin_rounds()

    async def _round(self) -> None:
        tokens = None
        if not self._session.is_finished:
            tokens = await self.before_end(self._all.rounds.run(self._session, self._place, self._lookup))
        if tokens is None:
            await self._finish()
            return
        self._all.num_tokens += len(tokens.token_ids)
        self._ready.append(tokens)

    async def _finish(self) -> None:
        """Make the last event of a session that is finished, or aborted."""
        requests, session = self._all, self._session
        if not session.is_finished:
            session.finish_reason = "abort"
            requests.rounds.record(session, self._place)
        if requests.directory.index_problem:
            session.warn(f"{requests.directory.index_problem}; the session is not recorded")
        elif session.keep:  # the next turn may come through another orchestrator
            if not await requests.recorder.until_written(session.session_id):
                session.warn("the index did not take the session in time; it is not recorded yet")
            requests.rounds.require_held(session)
        self._ready.append(session.finished())
        self._stage = Stage.ENDED

    def _end_session(self) -> None:
        self._all.num_total += 1
        self._all.sizer.forget(self._session.session_id)
        self._all.endings.end(self, self._session, self._place)

    @contextmanager
    def _read_in_time(self, stalled_seconds: float) -> Iterator[None]:
        """End the stream if its reader has an event in the block and does not ask for the next one in time."""
        stalled = DeadlineExceeded(
            f"the stream has not been read for {stalled_seconds:g} s; it is ended, and can be resumed"
        )
        timer = asyncio.get_running_loop().call_later(stalled_seconds, self.end, stalled)
        try:
            yield
        finally:
            timer.cancel()
