"""Requests from admission to release; called by all APIs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from math import inf

from bough import __version__
from bough.config.processes import OrchestratorConfig
from bough.errors import Exhausted, InvalidRequest, NotFound, StaleEpoch, Unavailable
from bough.protocol.decision import Decision
from bough.protocol.generation import (
    PROTOCOL_VERSION,
    Event,
    GenerateOptions,
    Loads,
    ModelInfo,
    Prompt,
    ServerInfo,
    Tokens,
)
from bough.telemetry.tracing import CURRENT_SPAN
from bough.trees.scheme_acceptance import SchemeAcceptance
from orchestrator.admission.active_streams import Running, Stream
from orchestrator.admission.admission import Admission, Hold
from orchestrator.admission.call_limiter import CallLimiter
from orchestrator.admission.size_limits import require_size_for_any
from orchestrator.cluster.directory import Directory
from orchestrator.cluster.served_models import context_limit, largest_context, served_models
from orchestrator.opening.endings import Endings
from orchestrator.opening.epochs import Epochs
from orchestrator.opening.opening import Opened, Opening
from orchestrator.opening.recorder import Recorder
from orchestrator.opening.target_waiting import TargetWaiting
from orchestrator.rounds.round import Rounds
from orchestrator.rounds.verifier import Verifier
from orchestrator.serving.model_texts import MOST_HELD, ModelTexts
from orchestrator.sessions.deadline import Deadline
from orchestrator.sessions.session import Session, never_begun
from orchestrator.sizing.totals import AcceptanceCounter, MeasuredSizer
from orchestrator.sizing.tree_sizer import TreeSizer
from orchestrator.telemetry.loop_lag import LoopLag
from orchestrator.telemetry.metrics import Figures
from orchestrator.telemetry.request_totals import RequestTotals, RequestWatch, TroubleCount

MAX_NAMES = 256  # limit of requests whose sessions are remembered, for `decisions`


class Requests:
    """All running requests."""

    def __init__(self, config: OrchestratorConfig, directory: Directory, holder_id: str) -> None:
        """`holder_id` identifies this orchestrator in claims of sessions."""
        self.directory = directory
        self.admission = Admission(config.max_running, config.max_waiting)
        self.totals = RequestTotals()
        self.call_limiter = CallLimiter(self.admission, lambda: largest_context(directory), self.totals.failed)
        self._queue_timeout = config.queue_timeout
        self._stalled_timeout = config.stalled_timeout
        self._claims = Epochs(directory, holder_id)
        self._recorder = Recorder(directory.registry)
        waiting = TargetWaiting(directory, self.admission, config.failover_timeout)
        self._opening = Opening(config, directory, self._recorder, self._claims, waiting)
        self.sizer = MeasuredSizer(TreeSizer.of(config))
        self._endings = Endings(directory, self._recorder)
        self._verifier = Verifier(config, directory, self._claims, self._endings)
        self._rounds = Rounds(config, directory, self.sizer, self._verifier, self._recorder, AcceptanceCounter())
        self.loop_lag = LoopLag()
        self._running = Running()
        self._sessions: OrderedDict[str, str] = OrderedDict()  # session ids of the latest requests, by request id
        self.texts = ModelTexts(TargetWaiting(directory, self.admission, config.failover_timeout, MOST_HELD), config)
        self.metrics_url = self.http_url = ""  # of this orchestrator, and of its OpenAI-compatible API
        self._model_name = ""  # of the target used last
        self._num_total = self._num_tokens = 0

    async def generate(
        self, prompt: Prompt, options: GenerateOptions, timeout_seconds: float | None = None, hold: Hold | None = None
    ) -> AsyncGenerator[Event]:
        """Yield the events of a request, which has an id and perhaps its turn already; closing the generator frees all.

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
        tokenizers = {target.tokenizer for target in self.directory.targets}
        require_size_for_any(prompt, tokenizers, largest_context(self.directory), context_limit(self.directory))
        stream = Stream(options.request_id, options.session_id, hold=hold or Hold())
        deadline = Deadline.of(timeout_seconds, inf if stream.hold.is_further else self._queue_timeout)
        placed = deadline.bound(self._placed(stream, prompt, options, deadline))
        watch = RequestWatch(self.totals)
        try:
            async with aclosing(stream.delivered(placed, self._stalled_timeout)) as events:
                async for event in events:
                    watch.note(event)
                    yield event
        except BaseException as exc:  # also where its caller leaves
            watch.failed(exc)
            raise

    async def _placed(
        self, stream: Stream, prompt: Prompt, options: GenerateOptions, deadline: Deadline
    ) -> AsyncGenerator[Event]:
        """The request, once it has its place; whatever ends it ends its wait at once."""
        async with AsyncExitStack() as place:
            earlier = place.enter_context(self._running.admitted(stream, takes_over=options.resume is not None))
            place.enter_context(self.admission.holding(stream.hold, earlier.hold if earlier is not None else None))
            opened = None
            try:
                opened = await stream.before_end(self._open(stream, place, prompt, options, deadline))
            finally:
                if earlier is not None:
                    runs = opened.session if opened is not None and opened.session.epoch else None
                    stream.takes_over(earlier, runs.session_id if runs is not None else "")
            if opened is None:
                for event in never_begun(options):
                    yield event
                return
            try:
                async with aclosing(self._stream(stream, opened)) as events:
                    async for event in events:
                        yield event
            except Exhausted as exc:  # from a target; the retry delay is estimated here
                raise self.admission.exhausted(str(exc)) from exc
            finally:
                self._num_total += 1

    async def _open(
        self, stream: Stream, place: AsyncExitStack, prompt: Prompt, options: GenerateOptions, deadline: Deadline
    ) -> Opened:
        """Open a session once there is a place; it is freed when `place` is closed."""
        with CURRENT_SPAN.get().child("queue"):
            await self.admission.place(stream.hold, deadline)
        with CURRENT_SPAN.get().child("open"):
            await self.directory.limiter.acquire()
            opened = await self._opening.open(prompt, options, place, deadline)
        opened.session.deadline, opened.session.trace = deadline, CURRENT_SPAN.get()
        await self._endings.done(opened.session.session_id)
        return opened

    async def _stream(self, stream: Stream, opened: Opened) -> AsyncGenerator[Event]:
        session, place = opened.session, opened.place
        rounds, troubles = self._rounds.run(session, place), TroubleCount(self.totals, session)
        try:
            num_seen = session.num_replayed - len(opened.unseen.token_ids if opened.unseen else ())
            self._note(session, place.target.info.model_name)
            yield session.started(num_seen)
            if opened.unseen is not None:
                yield opened.unseen
            while (event := await stream.before_end(anext(rounds, None))) is not None:
                troubles.count()
                self._num_tokens += len(event.token_ids) if isinstance(event, Tokens) else 0
                yield event
            if not session.is_finished:
                session.finish_reason = "abort"
                self._rounds.record(session, place)
            if self.directory.index_problem:
                session.warn(f"{self.directory.index_problem}; the session is not recorded")
            elif session.keep:  # the next turn may come through another orchestrator
                if not await self._recorder.settled(session.session_id):
                    session.warn("the index did not take the session in time; it is not recorded yet")
                self._rounds.require_held(session)
            yield session.finished()
        except StaleEpoch as exc:
            stream.end(exc)
            raise
        finally:
            troubles.count()
            self.sizer.forget(session.session_id)
            self._endings.end(stream, session, place)
            await rounds.aclose()  # last, as a further cancellation may interrupt it

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Measure the event loop's lag during the block; afterwards, clean up what streams have left."""
        try:
            async with self.loop_lag.running():
                yield
        finally:
            await self.drain("this orchestrator has ended; ask another orchestrator", 0.0)
            await self._endings.all_done()
            await self._recorder.close()

    async def drain(self, refusal: str, timeout_seconds: float) -> None:
        """Refuse further requests with this text, and let those that run or wait finish in time.

        Requests that do not finish in time end as Unavailable at any API, and their resources are freed.
        """
        self.admission.close(refusal)
        cut_off = Unavailable(f"{refusal}; this call was cut off, and can be resumed there")
        await self._running.finished_or_cut_off(timeout_seconds, cut_off)

    def abort(self, request_id: str) -> None:
        """End a request at once. Raises NotFound."""
        self._running.request(request_id).end()

    async def close_session(self, session_id: str) -> None:
        """Forget a session, here and at its workers; a running request of it ends. Raises NotFound or Unavailable."""
        if not session_id:
            raise InvalidRequest("session_id", "must be given", "none")
        if (stream := self._running.in_session(session_id)) is not None:
            stream.close(StaleEpoch(f"session_id: {session_id!r} was closed"))
        if not await self._endings.close(session_id) and stream is None:
            raise NotFound("session_id", f"{session_id!r} is not known")

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
            is_draftless=self._rounds.config.draft == "none",
            metrics_url=self.metrics_url,
            http_url=self.http_url,
        )

    def loads(self) -> Loads:
        """Current load. Requests that wait for a target or a KV slot have places, but count as waiting."""
        admission = self.admission
        return Loads(
            *self._counts,
            self._num_total,
            self._num_tokens,
            admission.max_running,
            admission.max_waiting,
            admission.wait_seconds,
        )

    @property
    def _counts(self) -> tuple[int, int]:
        """Requests that run, and that wait for a place, a target or a KV slot."""
        num_held_up = self._verifier.num_waiting + self._opening.waiting.num_held
        return self.admission.num_running - num_held_up, self.admission.num_waiting + num_held_up

    def figures(self) -> Figures:
        """Figures for Prometheus; any thread."""
        return Figures(
            self._model_name,
            *self._counts,
            self._num_tokens,
            self.totals,
            self.sizer.totals,
            self.loop_lag.tally,
            self.loop_lag.num_tasks,
            self._opening.waiting.num_held,
        )

    def acceptance(self) -> tuple[SchemeAcceptance, ...]:
        """Acceptance counts by scheme, depth and rank."""
        return self._rounds.acceptance.counts()

    def decisions(self, name: str) -> Sequence[Decision]:
        """The last rounds of a session, oldest first, by its id or that of a request in it; by "" of the latest.

        Raises NotFound if nothing is remembered of it.
        """
        if not (decisions := self.sizer.log.of(name) or self.sizer.log.of(self._sessions.get(name, name))):
            raise NotFound("session_id", "must be a session or request with recent rounds here", repr(name))
        return decisions

    def last_request(self, prefix: str) -> str:
        """The id of the latest request whose id has this prefix; empty if there is none."""
        return next((name for name in reversed(self._sessions) if name.startswith(prefix)), "") if prefix else ""

    def _note(self, session: Session, model_name: str) -> None:
        self._model_name = model_name
        self._sessions[session.request_id] = session.session_id
        if len(self._sessions) > MAX_NAMES:
            self._sessions.popitem(last=False)
