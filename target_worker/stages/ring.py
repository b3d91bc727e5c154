"""The links of a ring's members: each passes frames on to its successor, over one stream.

The head begins an *epoch*: it opens a stream to stage 1, whose first message is a hello. Each stage then opens one to
its successor, and when the last stage's hello reaches the head, the ring is up. Whatever fails at a link ends the epoch
in both directions: a member that loses one of its links ends the other, with the name of the member that failed. The
head then begins the next epoch. Frames of an epoch are forgotten with it.

A frame waits while the queue before it is full, at each place: a member stops reading, the stream's window fills up,
and its predecessor's `send` blocks. Heartbeats then wait too, so silence counts only while a member reads.

All state belongs to the event loop; the methods for the compute thread run there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import grpc

from bough.concurrency.tasks import end
from bough.errors import BoughError, DeadlineExceeded, InvalidRequest, RingLost, StaleEpoch, Unavailable
from bough.rpc.server import write
from bough.rpc.services import STAGES, ServicerContext, stub_of
from bough.rpc.status_map import to_error
from bough.runtime.log_lines import bounded
from bough.security.access import Access
from target_worker.stages import codec
from target_worker.stages.frames import (
    PIECE_BYTES,
    Assembler,
    Frame,
    Heartbeat,
    Hello,
    Piece,
    RingEnd,
    pieces,
    require_sizes,
)

__all__ = ["Frame", "Ring", "RingLost"]

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 2.0
SILENCE_SECONDS = 10.0  # without a message from a peer, after which its link is broken
RETRY_SECONDS = 0.5  # between two epochs that the head begins
FAREWELL_SECONDS = 1.0  # longest wait for a successor to hear why the epoch is over
WINDOW_BYTES = PIECE_BYTES  # for the servers of members: with a smaller window each piece takes a round trip more
MAX_WAITING = 2  # frames that wait to be sent, and frames that wait for the compute thread

Result = TypeVar("Result")


class _Links:
    """The links of one member in one epoch, and the frames that wait at them."""

    def __init__(self, hello: Hello, is_up: bool) -> None:
        self.hello, self.is_up = hello, is_up
        self.is_announced = False  # whether the compute thread of a stage knows the epoch
        self.incoming, self.outgoing = deque[Frame](), deque[Frame]()
        self.why = ""  # the epoch is over
        self.error: BoughError | None = None  # for the predecessor, if it says more than `why`
        self.predecessor, self.member, self.successor = (hello.name(hello.number + step) for step in (-1, 0, 1))

    def require(self) -> None:
        """Raises RingLost if the epoch is over."""
        if self.why:
            raise RingLost(self.why)


class Ring:
    """The links of one member: from its predecessor, and to its successor. Created on the event loop."""

    def __init__(
        self,
        access: Access,
        is_head: bool,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        self.accepts = True  # False while a stage loads: `Pass` answers UNAVAILABLE
        self._access, self._is_head = access, is_head
        self._heartbeat, self._silence = heartbeat_seconds, silence_seconds
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()  # replaced after each change
        self._receiving = asyncio.Lock()  # keeps the order of calls
        self._links: _Links | None = None  # of the newest epoch, which may be over
        self._newest = 0  # epoch that this member has begun or admitted, or heard of
        self._why_down = "the ring has not been connected yet"
        self._sending = set[asyncio.Task[None]]()  # to the successors of this and earlier epochs
        self._is_closed = False

    @property
    def epoch(self) -> int:
        """The present epoch; 0 while the ring is down. Any thread."""
        links = self._links
        return 0 if links is None or links.why or not links.is_up else links.hello.epoch

    @property
    def why_down(self) -> str:
        """Which member failed last, and how; empty while the ring is up. Any thread."""
        return "" if self.epoch else self._why_down

    def send(self, epoch: int, frame: Frame) -> None:
        """Queue a frame for the successor; blocks while two frames wait. The body must not change until it is sent.

        Raises:
            RingLost: the epoch is over.
            InvalidRequest: the frame is too large.
        """
        self._run(self._send(epoch, frame))

    def receiving(self, epoch: int, timeout_seconds: float) -> Future[Frame]:
        """The next frame at the head, after those of earlier calls.

        The future raises RingLost if the epoch is over; a timeout ends it.
        """
        return self._begun(self._receive(epoch, timeout_seconds))

    def next(self) -> tuple[int, bytes | None, Frame | None] | None:
        """Wait for what a stage does next; None after `close`.

        Either (epoch, the hello's payload, None) when an epoch begins, or (epoch, None, frame).
        """
        return None if self._is_closed else self._run(self._next())

    def fail(self, epoch: int, why: str) -> None:
        """End an epoch as this member cannot go on; does nothing if it is over. Any thread."""
        if not self._is_closed:
            self._loop.call_soon_threadsafe(self._fail, epoch, why)

    async def run(self, members: Callable[[], Sequence[str] | None], hello: Callable[[], bytes]) -> None:
        """Keep the ring connected, at the head, until cancelled.

        `members` returns the addresses of all members in order, the head's first, or None while one is missing.
        `hello` returns the payload of an epoch, at most 1 MB.
        """
        while True:
            if (addresses := members()) is not None:
                self._newest += 1
                links = self._begin(Hello(self._newest, tuple(addresses), 0, hello()), is_up=False)
                try:
                    await self._watched(links, links.successor, self._pass_on(links))
                finally:
                    self._end(links, f"{links.member} closed the ring")
            await asyncio.sleep(RETRY_SECONDS)

    async def close(self) -> None:
        """End the epoch and all waiting calls; later ones are refused. Cancel `run` first."""
        self._is_closed = True
        if self._links is not None:
            self._end(self._links, f"{self._links.member} ends")
        self._notify()
        if self._sending:
            await asyncio.wait(self._sending)

    async def Pass(self, messages: AsyncGenerator[Any, None], context: ServicerContext) -> None:
        """Serve the predecessor's stream until the epoch is over.

        Raises:
            InvalidRequest: names the field of a message.
            StaleEpoch: the hello's epoch is not the next one.
            RingLost, Unavailable: another member has failed, or this one is not ready.
        """
        async with aclosing(messages):
            try:
                message = await self._message(messages)
            except TimeoutError as exc:
                raise DeadlineExceeded(f"hello: must arrive within {self._silence:g} s") from exc
            first = None if message is None else codec.passed_from_wire(message)
            if not isinstance(first, Hello):
                raise InvalidRequest("hello", "must be the first message")
            links = self._admit(first)
            reading = self._start(links, links.predecessor, self._read(links, messages))
            beating = self._start(links, links.predecessor, self._beat(links, context))
            try:
                await self._until(lambda: links.why)
                # A call that ends while its caller writes loses its status (grpcio 1.85): the caller ends it.
                await asyncio.wait((reading, beating), timeout=FAREWELL_SECONDS)
            finally:  # also if gRPC cancels this call because the predecessor has gone
                self._end(links, f"{links.predecessor} closed its link")
                await end(reading, beating)
        raise links.error or RingLost(links.why)

    # How an epoch begins and ends.

    def _admit(self, hello: Hello) -> _Links:
        """The links of a predecessor's hello: new ones at a stage, those that it completes at the head."""
        hello.validate()
        if self._is_closed or not self.accepts:
            raise Unavailable("this member ends" if self._is_closed else "this stage is still loading its layers")
        if self._is_head != (hello.number == 0):
            raise InvalidRequest("hello.number", f"must be {'0' if self._is_head else 'above 0'} here", hello.number)
        links = self._links
        if self._is_head:
            if links is None or links.why or links.is_up or hello.epoch != links.hello.epoch:
                raise StaleEpoch(f"epoch {hello.epoch} is not the one that is being connected", self._newest)
            links.is_up = True
            logger.info("the ring is up: epoch %d with %d members", hello.epoch, len(hello.members))
            self._notify()
            return links
        if hello.epoch <= self._newest:
            raise StaleEpoch(f"epoch {hello.epoch} is over; the newest is {self._newest}", self._newest)
        if links is not None:
            self._end(links, f"epoch {links.hello.epoch} was replaced by epoch {hello.epoch}")
        links = self._begin(hello, is_up=True)
        sending = self._start(links, links.successor, self._pass_on(links))
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)
        return links

    def _begin(self, hello: Hello, is_up: bool) -> _Links:
        self._newest, self._links = hello.epoch, _Links(hello, is_up)
        self._notify()
        return self._links

    def _end(self, links: _Links, why: str, error: BoughError | None = None) -> None:
        """End an epoch, unless it is over."""
        if links.why:
            return
        links.why, links.error = bounded(why), error
        links.incoming.clear()
        links.outgoing.clear()
        if isinstance(error, StaleEpoch) and self._is_head:
            self._newest = max(self._newest, error.newest)  # of a stage that has outlived the head before this one
        if links is self._links:
            if links.is_up or links.why != self._why_down:  # not at every attempt
                logger.log(logging.WARNING if links.is_up else logging.INFO, "the ring is down: %s", links.why)
            self._why_down = links.why
        self._notify()

    def _fail(self, epoch: int, why: str) -> None:
        if (links := self._links) is not None and links.hello.epoch == epoch:
            self._end(links, f"{links.member}: {why}")

    def _start(self, links: _Links, peer: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.create_task(self._watched(links, peer, work))

    async def _watched(self, links: _Links, peer: str, work: Coroutine[Any, Any, None]) -> None:
        """Run one direction of the link with a peer; however it ends, the epoch is over."""
        try:
            await work
            self._end(links, f"{peer} closed its link")
        except Exception as exc:
            self._broken(links, peer, exc)

    def _broken(self, links: _Links, peer: str, exc: Exception) -> None:
        """End an epoch because of an error at the link with a peer."""
        error = to_error(exc, peer) if isinstance(exc, grpc.aio.AioRpcError) else exc
        if isinstance(error, TimeoutError):
            self._end(links, f"{peer} was silent for {self._silence:g} s")
        elif isinstance(error, StaleEpoch):
            self._end(links, why := f"{peer}: {error}", StaleEpoch(why, error.newest))
        elif isinstance(error, BoughError):
            is_ours = error is exc and isinstance(error, InvalidRequest)  # what we sent is not our predecessor's fault
            self._end(links, _named(peer, error), error if is_ours else None)
        else:
            logger.error("an unexpected error at the link with %s", peer, exc_info=exc)
            self._end(links, f"{peer}: {type(exc).__name__} at {links.member}")

    # The link to the successor.

    async def _pass_on(self, links: _Links) -> None:
        """Send hello and frames to the successor until the epoch is over, and then why."""
        async with self._access.channel(links.hello.members[links.hello.next_number]).opened() as channel:
            call = stub_of(STAGES, channel).Pass(metadata=self._access.credentials)
            listening = self._start(links, links.successor, self._listen(call))
            writing = self._start(links, links.successor, self._write(links, call))
            try:
                await self._until(lambda: links.why)
                # The successor ends the call when it has read why. A cancelled call loses what was not read.
                await asyncio.wait((listening, writing), timeout=FAREWELL_SECONDS)
            finally:
                call.cancel()
                await end(listening, writing)

    async def _listen(self, call: Any) -> None:
        """Hear the successor's heartbeats until it ends the call."""
        while True:
            async with asyncio.timeout(self._silence):
                reply = await call.read()
            if reply is grpc.aio.EOF:
                return
            if reply.why:
                raise RingLost(reply.why)

    async def _write(self, links: _Links, call: Any) -> None:
        # Errors mean that the call has ended: `_listen` has the reason.
        with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            await call.write(codec.passed_to_wire(links.hello._replace(number=links.hello.next_number)))
            num_sent = 0
            while not links.why:
                if links.outgoing:
                    num_sent += 1
                    await self._write_frame(links, call, num_sent)
                elif not await self._until(lambda: links.outgoing or links.why, self._heartbeat):
                    await call.write(codec.passed_to_wire(Heartbeat()))
            await call.write(codec.passed_to_wire(RingEnd(links.why)))
            await call.done_writing()
        await self._until(lambda: links.why)

    async def _write_frame(self, links: _Links, call: Any, number: int) -> None:
        for piece in pieces(number, links.outgoing[0]):
            await call.write(codec.passed_to_wire(piece))
            if links.why:
                return
        links.outgoing.popleft()
        self._notify()

    # The link from the predecessor.

    async def _message(self, messages: AsyncGenerator[Any, None]) -> Any:
        """The next message; None at the stream's end. Raises TimeoutError, or Unavailable."""
        try:
            async with asyncio.timeout(self._silence):
                return await anext(messages, None)
        except grpc.aio.BaseError as exc:  # of gRPC itself: the peer has gone, or this server stops
            raise Unavailable(f"the stream has ended: {exc}") from exc

    async def _read(self, links: _Links, messages: AsyncGenerator[Any, None]) -> None:
        """Take frames in until the predecessor closes the stream; ignores what comes when the epoch is over."""
        assembler = Assembler()
        while (message := await self._message(messages)) is not None:
            if not links.why:
                try:
                    await self._take_in(links, assembler, codec.passed_from_wire(message))
                except (InvalidRequest, RingLost) as exc:
                    self._broken(links, links.predecessor, exc)

    async def _take_in(self, links: _Links, assembler: Assembler, message: codec.Passed) -> None:
        if isinstance(message, RingEnd):
            raise RingLost(message.why or f"{links.predecessor} ended the epoch")
        if isinstance(message, Hello):
            raise InvalidRequest("hello", "must be the first message only")
        frame = assembler.add(message) if isinstance(message, Piece) else None
        if frame is None:
            return
        frame = frame._replace(arrived_ns=time.perf_counter_ns())
        await self._until(lambda: links.why or len(links.incoming) < MAX_WAITING)
        if not links.why:
            links.incoming.append(frame)
            self._notify()

    async def _beat(self, links: _Links, context: ServicerContext) -> None:
        """Send heartbeats to the predecessor, and last why the epoch is over.

        It is not cancelled before that: after a write that was cancelled gRPC cannot send a status.
        """
        while not links.why:
            await write(context, codec.reply_to_wire(), self._silence)
            await self._until(lambda: links.why, self._heartbeat)
        await write(context, codec.reply_to_wire(links.why), FAREWELL_SECONDS)

    # What the compute thread asks for.

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self._begun(work).result()

    def _begun(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        if self._is_closed:  # the event loop may have ended
            work.close()
            raise RingLost("the ring is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _send(self, epoch: int, frame: Frame) -> None:
        require_sizes(len(frame.header), memoryview(frame.body).nbytes)
        links = self._of(epoch)
        await self._until(lambda: links.why or len(links.outgoing) < MAX_WAITING)
        links.require()
        links.outgoing.append(frame)
        self._notify()

    async def _receive(self, epoch: int, timeout_seconds: float) -> Frame:
        async with self._receiving:
            links = self._of(epoch)
            if not await self._until(lambda: links.why or links.incoming, timeout_seconds):
                late = ", ".join(map(links.hello.name, range(1, len(links.hello.members))))
                self._end(links, f"no frame came back within {timeout_seconds:g} s from {late}")
            links.require()
            frame = links.incoming.popleft()
            self._notify()
            return frame

    async def _next(self) -> tuple[int, bytes | None, Frame | None] | None:
        await self._until(lambda: self._is_closed or self._has_next)
        links = self._links
        if self._is_closed or links is None:
            return None
        if not links.is_announced:
            links.is_announced = True
            return links.hello.epoch, links.hello.payload, None
        frame = links.incoming.popleft()
        self._notify()
        return links.hello.epoch, None, frame

    @property
    def _has_next(self) -> bool:
        links = self._links
        return links is not None and not links.why and bool(links.incoming or not links.is_announced)

    def _of(self, epoch: int) -> _Links:
        """The links of the present epoch. Raises RingLost if this is not its number."""
        links = self._links
        if links is None or links.hello.epoch != epoch:
            raise RingLost(self.why_down or f"epoch {epoch} is over")
        links.require()
        return links

    async def _until(self, ready: Callable[[], object], seconds: float | None = None) -> bool:
        """Wait until `ready` returns something true; False if it does not in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not ready():
                    await self._changed.wait()
                return True
        return False

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _named(peer: str, error: BoughError) -> str:
    """An error that a peer reported, with its name, unless it is about another member."""
    text = str(error)
    return text if isinstance(error, RingLost) or text.startswith(peer) else f"{peer}: {text}"
