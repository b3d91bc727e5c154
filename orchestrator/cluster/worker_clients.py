"""gRPC clients of draft and target workers, and a limit on how many sessions continue at once."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import grpc
from google.protobuf.descriptor import ServiceDescriptor

from bough.errors import BoughError, PrefixMissing, Unavailable
from bough.pb import common_pb2
from bough.protocol import codec
from bough.protocol.codec_fields import read
from bough.protocol.generation import WorkerInfo
from bough.protocol.ids import ScopedId
from bough.protocol.messages import Context, GrowCall, GrowResult, VerifyCall, VerifyResult
from bough.protocol.prefix_hash import prefix_hash
from bough.rpc.services import DRAFT, TARGET, stub_of
from bough.rpc.status_map import to_error
from bough.security.access import OPEN, Access
from bough.telemetry.call_context import carried
from bough.telemetry.tracing import NO_SPAN, Span
from bough.trees.tree_plan import TreePlan
from orchestrator.sessions.session import Session
from orchestrator.sizing.plans import Proposal

INFO_TIMEOUT_SECONDS = 5.0
RELEASE_TIMEOUT_SECONDS = 5.0
AT_ONCE = 4  # sessions that continue in one iteration of the event loop; one sweep may answer hundreds together

Reply = TypeVar("Reply")
Result = TypeVar("Result", GrowResult, VerifyResult)


class IterationLimiter:
    """Lets at most `most` callers continue in each iteration of the event loop, first come, first served.

    Fewer callers never wait. If hundreds wake at once, timers, new calls and health checks run between them
    instead of after all.
    """

    def __init__(self, most: int) -> None:
        self._most = self._num_free = most
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_counting = False  # whether `_next_iteration` is scheduled

    async def acquire(self) -> None:
        """Wait until the caller may continue; returns at once if this iteration's limit is not reached."""
        if not self._is_counting:
            self._is_counting = True
            asyncio.get_running_loop().call_soon(self._next_iteration)
        if self._num_free:
            self._num_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _next_iteration(self) -> None:
        self._num_free = self._most
        while self._waiting and self._num_free:
            turn = self._waiting.popleft()
            if not turn.done():  # otherwise the caller was cancelled
                turn.set_result(None)
                self._num_free -= 1
        self._is_counting = self._num_free < self._most
        if self._is_counting:
            asyncio.get_running_loop().call_soon(self._next_iteration)


class Timed(NamedTuple):
    """Duration of a call, and the part of it outside the worker."""

    network_ns: int
    total_ns: int


TimedResult = tuple[VerifyResult, Timed]


class Reserved(NamedTuple):
    """A session has a slot at a target."""

    held: int  # of its tokens that are in the slot
    answer: TimedResult | None  # the verdict, if nothing else was missing


class Belief(Protocol):
    """What a target is believed to hold of a session."""

    held: int  # leading tokens

    def believe(self, num_tokens: int) -> None: ...


class WorkerClient:
    """Client of a worker of either kind: address, channel and stub."""

    def __init__(
        self, address: str, service: ServiceDescriptor, access: Access, limiter: IterationLimiter | None
    ) -> None:
        """`limiter` is shared by all clients of an event loop; it limits how many sessions continue at once."""
        self.address, self._access, self._service = address, access, service
        self._limiter = limiter or IterationLimiter(AT_ONCE)
        self._channel = access.channel(address)
        self._opened = self._channel.current
        self._made = stub_of(service, self._opened)

    @property
    def _stub(self) -> Any:
        """The stub for the next call; a new one after this process's certificate has changed."""
        if self._opened is not self._channel.current:
            self._opened = self._channel.current
            self._made = stub_of(self._service, self._opened)
        return self._made

    async def close(self) -> None:
        await self._channel.close()

    async def info(self) -> WorkerInfo:
        """What the worker serves."""
        request = common_pb2.GetServerInfoRequest()
        return read(await self._ask(self._stub.GetServerInfo, request, INFO_TIMEOUT_SECONDS), WorkerInfo)

    async def release(self, session_id: ScopedId, epoch: int) -> None:
        """Release a session, unless it has a newer epoch; epoch 0 always releases."""
        request = common_pb2.ReleaseRequest(session_id=str(session_id), epoch=epoch)
        await self._ask(self._stub.Release, request, RELEASE_TIMEOUT_SECONDS)

    async def _ask_in_turn(
        self, method: Callable[..., Awaitable[Reply]], request: object, timeout_seconds: float, span: Span
    ) -> Reply:
        """Make one call, and return when the limiter lets the session continue."""
        reply = await self._ask(method, request, timeout_seconds, span)
        await self._limiter.acquire()
        return reply

    async def _ask(
        self, method: Callable[..., Awaitable[Reply]], request: object, timeout_seconds: float, span: Span = NO_SPAN
    ) -> Reply:
        """Make one call, within a span. Raises the worker's error, or Unavailable, also if the channel is closed."""
        metadata = (*self._access.credentials, *carried(span))
        try:
            reply = await method(request, timeout=timeout_seconds, metadata=metadata)
        except grpc.aio.AioRpcError as exc:
            raise to_error(exc, self.address) from exc
        except grpc.aio.UsageError as exc:  # the worker was forgotten while a request waited for it
            raise Unavailable(f"{self.address}: the connection was closed") from exc
        except asyncio.CancelledError as exc:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise Unavailable(f"{self.address}: the connection was closed") from exc  # not this task: the call
        if reply is None:  # gRPC returns None for bytes that it cannot decode
            raise BoughError(f"{self.address}: its answer cannot be decoded")
        return reply


class DraftClient(WorkerClient):
    """Client of bough.v1.Draft."""

    def __init__(self, address: str, access: Access = OPEN, limiter: IterationLimiter | None = None) -> None:
        super().__init__(address, DRAFT, access, limiter)

    async def grow(
        self, session: Session, plan: TreePlan, vocab_size: int, timeout_seconds: float
    ) -> tuple[GrowResult, Timed]:
        """Grow a tree for the session's next round, from its target's vocabulary; with the call's duration."""

        async def call(context: Context) -> GrowResult:
            # Positions of roots are unique in a session, across turns as well: rounds share no random numbers.
            round_ = context.base_length
            grow = GrowCall(context, session.tokens[-1], session.sampling, round_, plan, vocab_size, session.epoch)
            request = codec.grow_call_to_wire(grow)
            with session.span.call("bough.v1.Draft/Grow", self.address) as span:
                reply = await self._ask_in_turn(self._stub.Grow, request, timeout_seconds, span)
                return codec.grow_result_from_wire(reply)

        return await _with_context(session, session.draft_held, call)


class TargetClient(WorkerClient):
    """Client of bough.v1.Target."""

    def __init__(
        self, address: str, worker_id: str, access: Access = OPEN, limiter: IterationLimiter | None = None
    ) -> None:
        super().__init__(address, TARGET, access, limiter)
        self._worker_id, self._caller = worker_id, uuid.uuid4().hex

    async def verify(
        self, session: Session, proposal: Proposal, belief: Belief, num_running: int, timeout_seconds: float
    ) -> TimedResult:
        """Get the verdict on a tree, with the call's duration; `num_running` sessions run there now.

        Afterwards the tokens that the target reports as missing are not believed to be there.
        """

        def call(context: Context) -> Awaitable[VerifyResult]:
            belief.believe(context.context_start)
            return self._verify(session, proposal, num_running, timeout_seconds, context)

        return await _with_context(session, belief.held, call)

    async def reserve(self, session: Session, proposal: Proposal, num_running: int, timeout_seconds: float) -> Reserved:
        """Ask for a slot without sending the context: the target reserves it before it reports missing tokens.

        Raises Exhausted if there is no room.
        """
        context = _context(session, len(session.tokens))
        call = self._verify(session, proposal, num_running, timeout_seconds, context, reserves=True)
        try:
            answer = await _timed(call)
            return Reserved(answer[0].held_length, answer)
        except PrefixMissing as exc:
            return Reserved(_common(session.tokens, exc), None)

    async def _verify(
        self,
        session: Session,
        proposal: Proposal,
        num_running: int,
        timeout_seconds: float,
        context: Context,
        *,
        reserves: bool = False,
    ) -> VerifyResult:
        verify = VerifyCall(
            context,
            session.epoch,
            session.round,
            proposal.tree,
            session.sampling,
            proposal.scheme,
            session.max_length,
            self._caller,
            num_running,
            self._worker_id,
            proposal.may_leave_out,
            reserves,
            proposal.is_given,
        )
        request = codec.verify_call_to_wire(verify)
        with session.span.call("bough.v1.Target/Verify", self.address) as span:
            reply = await self._ask_in_turn(self._stub.Verify, request, timeout_seconds, span)
            if proposal.is_given:  # scores of hundreds of tokens, each perhaps with dozens of alternatives
                return await asyncio.to_thread(codec.verify_result_from_wire, reply)
            return codec.verify_result_from_wire(reply)


async def _with_context(
    session: Session, held: int, call: Callable[[Context], Awaitable[Result]]
) -> tuple[Result, Timed]:
    """Send the tokens that the worker is believed to lack; if that is wrong, start from the tokens it reports.

    If that fails as well, everything is sent.
    """

    async def tries() -> Result:
        try:
            return await call(_context(session, held))
        except PrefixMissing as exc:
            try:
                return await call(_context(session, _common(session.tokens, exc)))
            except PrefixMissing:
                return await call(_context(session, 0))

    return await _timed(tries())


async def _timed(call: Awaitable[Result]) -> tuple[Result, Timed]:
    began_ns = time.perf_counter_ns()
    result = await call
    total_ns = time.perf_counter_ns() - began_ns
    return result, Timed(max(0, total_ns - result.timings.total_ns), total_ns)


def _context(session: Session, held: int) -> Context:
    return Context.of(session.session_id, session.tokens, held, session.prompt_length, session.cache_salt)


def _common(tokens: Sequence[int], exc: PrefixMissing) -> int:
    """Number of the session's leading tokens that the worker holds: all that it reports, or none."""
    is_ours = exc.held_length < len(tokens) and prefix_hash(tokens[: exc.held_length]) == exc.held_hash
    return exc.held_length if is_ours else 0
