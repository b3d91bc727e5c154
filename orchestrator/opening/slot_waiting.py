"""Waiting for KV slots at targets: in which order, and at which of several targets."""

from __future__ import annotations

import asyncio
import time
from bisect import insort
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf

from bough.config.processes import OrchestratorConfig
from bough.errors import BoughError, Exhausted, NoAnswer, Preempted
from orchestrator.cluster.directory import Directory
from orchestrator.cluster.expected_wait import Need, expected_wait
from orchestrator.cluster.worker_clients import TimedResult
from orchestrator.cluster.worker_handle import TargetHandle
from orchestrator.cluster.worker_health import is_fault
from orchestrator.opening.endings import Endings
from orchestrator.opening.target_lease import TargetLease
from orchestrator.sessions.session import Session
from orchestrator.sizing.plans import Proposal

RETRY_SECONDS = 0.25  # between two requests for a slot


@dataclass(slots=True, eq=False)
class QueuePlace:
    """A waiting session's place."""

    epoch: int  # a time: when its request began, or was moved
    is_first: asyncio.Event = field(default_factory=asyncio.Event)  # set while no older session waits

    async def first(self, deadline: float) -> None:
        """Wait until no older session waits. Raises Exhausted at `deadline`, in seconds on the monotonic clock."""
        try:
            async with asyncio.timeout_at(deadline if deadline < inf else None):
                await self.is_first.wait()
        except TimeoutError as exc:
            raise Exhausted("no KV slot came free in time (--queue-timeout)") from exc


class SlotQueue:
    """Ordered by age, not by arrival: a session preempted in the middle of a request comes before new ones."""

    def __init__(self) -> None:
        self._places: list[QueuePlace] = []

    @property
    def is_empty(self) -> bool:
        return not self._places

    @contextmanager
    def place(self, epoch: int) -> Iterator[QueuePlace]:
        place = QueuePlace(epoch)
        insort(self._places, place, key=lambda each: each.epoch)
        self._tell()
        try:
            yield place
        finally:
            self._places.remove(place)
            self._tell()

    def _tell(self) -> None:
        for index, place in enumerate(self._places):
            (place.is_first.clear if index else place.is_first.set)()


@dataclass(slots=True)
class Slots:
    """Verifies trees once there is a slot for their sessions.

    A session that is refused a slot, or was preempted, waits; among sessions that the same targets can serve, only the
    oldest asks, without sending its context. It takes any target with room, unless waiting for its own target's cached
    tokens is faster than computing them again.
    """

    config: OrchestratorConfig
    directory: Directory
    endings: Endings
    num_waiting: int = 0
    _lines: defaultdict[str, SlotQueue] = field(default_factory=lambda: defaultdict(SlotQueue))  # by target identity

    async def verify(self, session: Session, lease: TargetLease, proposal: Proposal) -> TimedResult:
        """Get the verdict of the leased target, or of another one with room, to which the lease moves.

        Raises the target's error, or Exhausted if no slot became free in the time that the request may wait.
        """
        line, believed = self._lines[session.target_identity], session.target_held
        # A session whose KV the target holds does not wait: the others may be waiting for its very slot.
        # One that was moved reserves its slot first, since the sessions of a lost target all come at the same time.
        may_ask = lease.has_slot or session.target_held > 0 or (line.is_empty and not lease.has_moved)
        num_refused = 0
        while True:
            if may_ask:
                try:
                    target, seconds = lease.target, session.deadline.within(self.config.target_timeout)
                    answer = await target.client.verify(session, proposal, target.num_running, seconds)
                    lease.has_slot = True
                    return answer
                except Preempted:
                    lease.was_refused = True
                    session.gave_way(lease.target.record.worker_id)
                    lease.has_slot = False
                except Exhausted:
                    lease.was_refused = True
                    if not session.slot_seconds:
                        raise
                    num_refused += 1
                    # A leased slot keeps its tokens: if some are gone, so is the lease, as after a long pause.
                    lease.has_slot = lease.has_slot and session.target_held >= believed
            self.num_waiting += 1
            try:
                with session.deadline.waiting():
                    if lease.has_slot or num_refused > 1:  # only the tree is missing, or a reservation failed
                        await asyncio.sleep(RETRY_SECONDS)
                    if not lease.has_slot and (answered := await self._turn(line, session, lease, proposal)):
                        return answered
            finally:
                self.num_waiting -= 1
            may_ask = True

    async def _turn(
        self, line: SlotQueue, session: Session, lease: TargetLease, proposal: Proposal
    ) -> TimedResult | None:
        """Wait for a slot at any target; returns the verdict if nothing else was missing."""
        deadline = time.monotonic() + session.slot_seconds
        with lease.given_up(), line.place(session.epoch) as place:
            answer = await self._first_with_room(session, lease, proposal, place, deadline)
        lease.has_slot = answer is not None
        return answer

    async def _first_with_room(
        self, session: Session, lease: TargetLease, proposal: Proposal, place: QueuePlace, deadline: float
    ) -> TimedResult | None:
        began, home, home_answered = time.monotonic(), lease.target, False
        refusal = Exhausted("KV memory: no target has room")
        while True:
            await place.first(deadline)
            for target in self._worth_asking(session, home, len(proposal.tree), time.monotonic() - began):
                seconds = session.deadline.within(self.config.target_timeout)
                try:
                    held, answer = await target.client.reserve(session, proposal, target.num_running + 1, seconds)
                except asyncio.CancelledError:
                    if target is not home:  # it may have reserved a slot, and will not be told of the request's end
                        self.endings.let_go(session, target, lease)
                    raise
                except Exhausted as exc:
                    refusal, lease.was_refused, home_answered = exc, True, home_answered or target is home
                    continue
                except BoughError as exc:
                    if target is home and home_answered and isinstance(exc, NoAnswer):
                        raise NoAnswer(str(exc)) from exc  # as it outlived the same call before
                    if target is home or not is_fault(exc):
                        raise
                    target.health.blame(session.session_id, exc)
                    # It may have reserved a slot before the answer was lost.
                    self.endings.let_go(session, target, lease)
                    continue
                lease.target, session.target_held = target, held
                return answer
            if time.monotonic() + RETRY_SECONDS > deadline:
                raise refusal
            await asyncio.sleep(RETRY_SECONDS)

    def _worth_asking(
        self, session: Session, home: TargetHandle, num_nodes: int, waited_seconds: float
    ) -> list[TargetHandle]:
        """The session's own target, and others that would not finish it later, the best first.

        The remaining wait at its own target is unknown; it is assumed to be at least the time waited already, so that a
        session does not wait forever beside an idle target.
        """
        home_id = home.record.worker_id
        need = Need(len(session.tokens), session.num_remaining, {home_id: session.target_held}, home_id)
        at_home = home.expected_seconds(need)
        limit = at_home + max(waited_seconds, expected_wait(home.speed, home.num_running, at_home))
        others = [
            target
            for target in self.directory.alike(*session.ground, session.max_length, num_nodes)
            if target is not home
            and target.is_usable_by(session.session_id)
            and not target.is_leaving
            and target.expected_seconds(need) <= limit
        ]
        return [home, *sorted(others, key=lambda target: target.expected_seconds(need))]
