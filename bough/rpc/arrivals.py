"""Bounds the memory of partly received messages.

gRPC buffers the arriving parts of a message while somebody reads its call; otherwise a stream may send only its first
window (`WINDOW_BYTES`). So every message is read here, in one of a few places and for a limited time. gRPC's own
handlers of calls with one message would read before any of our code runs.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from ipaddress import IPv6Network
from urllib.parse import unquote

from grpc.aio import EOF

from bough.errors import DeadlineExceeded, Exhausted, InvalidRequest
from bough.rpc.services import ServicerContext
from bough.rpc.status_map import abort

WINDOW_BYTES = 16 * 1024  # a stream may send this before its call is read
MAX_WAITING = 1024  # waiting calls of one kind of caller
RETRY_SECONDS = 1.0
WAIT_SECONDS = 30.0  # longest wait for a place

# The authenticated name of the running task's caller; empty if callers are known only by their address.
CALLER: ContextVar[str] = ContextVar("caller", default="")


@dataclass(slots=True, eq=False)
class Arrivals:
    """The places in which messages of one kind of caller arrive; no caller can take them all."""

    places: int  # each may hold a message of the largest size
    places_each: int  # of one caller
    seconds: float  # limit for which one message may arrive
    max_bytes: int  # of a message
    _held: Counter[str] = field(default_factory=Counter)  # places, by caller
    _waiting: dict[str, deque[asyncio.Future[None]]] = field(default_factory=dict)  # by caller, none of them empty

    async def read(self, context: ServicerContext) -> bytes | None:
        """Read the call's next message; None if the caller has closed its side, or was refused as too slow.

        Raises:
            Exhausted: too many messages are arriving.
            InvalidRequest: the message is too large.
        """
        caller = CALLER.get() or network(context.peer())
        await self._take(caller)
        try:
            async with asyncio.timeout(self.seconds):
                data = await context.read()
        except TimeoutError:
            # The place is freed only when gRPC has sent the status, and with it freed the received part.
            slow = DeadlineExceeded(f"message: must arrive within {self.seconds:g} s, but is incomplete")
            await abort(context, slow, timeout_seconds=None)
            return None
        finally:
            self._give_back(caller)
        if data is EOF:
            return None
        if len(data) > self.max_bytes:
            raise InvalidRequest("message", f"must have at most {self.max_bytes} bytes", len(data))
        return bytes(data)

    async def _take(self, caller: str) -> None:
        if self._is_free(caller):
            self._held[caller] += 1
        else:
            await self._wait(caller)

    def _give_back(self, caller: str) -> None:
        self._held[caller] -= 1
        if not self._held[caller]:
            del self._held[caller]
        self._hand_on()

    def _is_free(self, caller: str) -> bool:
        return self._held[caller] < self.places_each and self._held.total() < self.places

    async def _wait(self, caller: str) -> None:
        num_own = len(self._waiting.get(caller, ()))
        if self._num_waiting >= MAX_WAITING or num_own >= MAX_WAITING // 2:
            raise self._exhausted()
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await turn
        except BaseException as exc:
            turns = self._waiting.get(caller, deque())
            if turn not in turns:  # it has a place by now
                self._give_back(caller)
            elif len(turns) > 1:
                turns.remove(turn)
            else:
                del self._waiting[caller]
            if isinstance(exc, TimeoutError):
                raise self._exhausted() from exc
            raise

    @property
    def _num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def _hand_on(self) -> None:
        """Give free places to those waiting callers that have fewest, in turn."""
        while free := [caller for caller in self._waiting if self._is_free(caller)]:
            caller = min(free, key=self._held.__getitem__)
            turns = self._waiting.pop(caller)
            turn = turns.popleft()
            if turns:
                self._waiting[caller] = turns  # at the end of the queue
            self._held[caller] += 1
            if not turn.done():  # a cancelled one gives its place back when it is woken
                turn.set_result(None)

    def _exhausted(self) -> Exhausted:
        return Exhausted(
            f"messages of {self._held.total()} calls are arriving, of which one caller may have {self.places_each}, "
            f"and {self._num_waiting} more calls wait",
            RETRY_SECONDS,
        )


@lru_cache(1024)
def network(peer: str) -> str:
    """The address in gRPC's name of a peer, without its port; for IPv6 its /64 network."""
    kind, _, rest = peer.partition(":")
    address = unquote(rest).rpartition(":")[0].strip("[]")
    if kind != "ipv6":
        return address
    return str(IPv6Network((address.partition("%")[0], 64), strict=False))
