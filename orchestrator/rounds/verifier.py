"""Verifies at any suitable target: a target that fails or has no room costs only time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from bough.config.processes import OrchestratorConfig
from bough.errors import BoughError, Exhausted, NoAnswer, Preempted, StaleEpoch, Unavailable
from bough.protocol.generation import weights_differ
from orchestrator.cluster.directory import Directory
from orchestrator.cluster.target_place import PlaceState, SlotQueue, TargetPlace
from orchestrator.cluster.worker_clients import TimedResult
from orchestrator.cluster.worker_handle import Need, TargetHandle, expected_wait, is_fault
from orchestrator.opening.endings import Endings
from orchestrator.opening.epochs import Epochs
from orchestrator.sessions.session import Session
from orchestrator.sizing.plans import Proposal

logger = logging.getLogger(__name__)

RETRY_SLOT_SECONDS = 0.25  # between two requests for a slot
RETRY_SECONDS = 1.0  # after the first fault, time in which only the same target is tried
MOST_TARGETS = 3  # consecutive targets that a call may fail at or bring down before it counts as the call's own fault
MOST_IN_ALL = 9  # the same, if meanwhile others were lost without it or had no room, as while all targets restart
DOUBT_SECONDS = 4.0  # pause before the last target that a call may bring down: others may be lost without it meanwhile
MOST_REMEMBERED = 64  # targets that were lost
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.05, 0.5  # between two attempts


@dataclass(slots=True)
class _Trouble:
    """Faults of one call so far."""

    began: float  # since the last answer, in seconds on the monotonic clock
    pause_seconds: float = FIRST_PAUSE_SECONDS
    failed_at: set[str] = field(default_factory=set)  # targets that answered with an error and are still there
    num_in_row: int = 0  # targets where it failed, or that were lost in a sweep with it, since the last answer
    num_in_all: int = 0
    lost_with: set[str] = field(default_factory=set)  # targets that were lost in a sweep with it
    counted_at: float = 0.0  # when the last of them was
    away_seconds: float = 0.0  # seconds without a usable target since the last answer; the time of calls does not count

    def answered(self) -> None:
        """Note that a target refused the call for lack of room since the last fault: the call did not bring it down."""
        self.began, self.pause_seconds = time.monotonic(), FIRST_PAUSE_SECONDS
        self.num_in_row, self.away_seconds = 0, 0.0

    def count(self, exc: BoughError) -> None:
        """Count a fault that may be the call's own; a target that was lost without the call has another cause."""
        may_be_cause = exc.was_connected if isinstance(exc, NoAnswer) else not isinstance(exc, Unavailable)
        self.num_in_all += may_be_cause
        if may_be_cause:
            self.num_in_row += 1
        elif isinstance(exc, NoAnswer):
            self.num_in_row = 0

    @property
    def is_own_fault(self) -> bool:
        """Whether the faults are considered the call's own."""
        return self.num_in_row >= MOST_TARGETS or self.num_in_all >= MOST_IN_ALL

    async def pause(self) -> None:
        await asyncio.sleep(self.pause_seconds)
        self.pause_seconds = min(2 * self.pause_seconds, LONGEST_PAUSE_SECONDS)


@dataclass(slots=True)
class Verifier:
    """Gets a verdict on a tree from the session's target, or from another one of the same model.

    A session that is refused a slot, or was preempted, waits; among sessions that the same targets can serve, only the
    oldest asks, without sending its context. It takes any target with room, unless waiting for its own target's cached
    tokens is faster than computing them again. If its target fails, it moves. The tree stays the same, and so does the
    verdict in every scheme.
    """

    config: OrchestratorConfig
    directory: Directory
    claims: Epochs
    endings: Endings
    num_waiting: int = 0  # sessions that wait for a slot
    _queues: defaultdict[str, SlotQueue] = field(default_factory=lambda: defaultdict(SlotQueue))  # by target identity
    _lost_at: dict[str, float] = field(default_factory=dict)  # when targets were lost, the latest last

    async def verify(self, session: Session, place: TargetPlace, proposal: Proposal) -> TimedResult:
        """Get the verdict; if the target fails or has no room, the session's place may move to another one.

        Raises:
            Unavailable: no target could be used for as long as the configuration allows.
            Exhausted: no KV slot became free in time.
            StaleEpoch: another orchestrator has taken the session.
            BoughError: the call fails at every target, or the target's weights differ from those that the session began
                with.
        """
        trouble: _Trouble | None = None
        has_overtaken = False
        while True:
            session.require_weights(place.target.info)
            try:
                answer = await self._step(session, place, proposal)
            except asyncio.CancelledError:
                place.interrupted()  # leaves the queue at once, before its reader takes the last event
                raise
            except StaleEpoch as exc:
                if has_overtaken:
                    raise
                place.interrupted()
                await self.claims.overtake(session, exc)
                has_overtaken = True
            except BoughError as exc:
                if not is_fault(exc):
                    raise
                logger.warning("%s: %s", place.target.record.worker_id, exc)
                trouble = trouble or _Trouble(time.monotonic())
                if place.num_refused:
                    trouble.answered()
                place.interrupted()
                await self._recover(session, place, len(proposal.tree), trouble, exc)
            else:
                if answer is not None:
                    place.answered()
                    place.target.health.succeeded(session.session_id)
                    place.target.observe(answer[0])
                    return answer

    async def _step(self, session: Session, place: TargetPlace, proposal: Proposal) -> TimedResult | None:
        """Ask for the verdict, or for a slot if the session needs one first. None if another call is needed."""
        queue = self._queues[session.target_identity]
        # A session whose KV is at the target does not wait: the others may be waiting for its slot.
        # One that was moved reserves its slot first, since the sessions of a lost target all come at the same time.
        is_late = place.state is PlaceState.NEW and not place.held and not queue.is_empty
        if is_late or place.state is PlaceState.MOVING:
            place.wait(queue, session.epoch)
        if place.state is PlaceState.WAITING:
            with self._waiting(session):
                return await self._reserve(session, place, proposal)
        target, believed = place.target, place.held
        try:
            seconds = session.deadline.within(self.config.target_timeout)
            return await target.client.verify(session, proposal, place, target.num_running, seconds)
        except Preempted:
            place.gave_way()
            session.gave_way(target.record.worker_id)
        except Exhausted:
            if not session.slot_seconds:
                raise
            place.refused(believed)
        if place.state is not PlaceState.HELD:
            place.wait(queue, session.epoch)
        with self._waiting(session):
            if place.state is PlaceState.HELD or place.num_refused > 1:  # or the reservation failed
                await asyncio.sleep(RETRY_SLOT_SECONDS)
        return None

    async def _reserve(self, session: Session, place: TargetPlace, proposal: Proposal) -> TimedResult | None:
        """Once no older session waits, ask targets for a slot. Returns the verdict if nothing else was missing."""
        queued, deadline = place.queue_place, time.monotonic() + session.slot_seconds
        assert queued is not None, "it waits"
        await queued.first(deadline)
        for target in self._worth_asking(session, place, len(proposal.tree), time.monotonic() - queued.began):
            is_home = target is place.target
            seconds = session.deadline.within(self.config.target_timeout)
            try:
                held, answer = await target.client.reserve(session, proposal, target.num_running + 1, seconds)
            except asyncio.CancelledError:
                if not is_home:  # it may have reserved a slot, and would not hear of the request's end
                    self.endings.let_go(session, target, place)
                raise
            except Exhausted as exc:
                place.has_no_room(target, exc)
                continue
            except BoughError as exc:
                if is_home and queued.has_home_refused and isinstance(exc, NoAnswer):
                    raise NoAnswer(str(exc)) from exc  # as it outlived the same call before
                if is_home or not is_fault(exc):
                    raise
                target.health.blame(session.session_id, exc)
                self.endings.let_go(session, target, place)  # it may have reserved a slot before the answer was lost
                continue
            place.reserved(target, held)
            return answer
        if time.monotonic() + RETRY_SLOT_SECONDS > deadline:
            raise queued.refusal
        await asyncio.sleep(RETRY_SLOT_SECONDS)
        return None

    def _worth_asking(
        self, session: Session, place: TargetPlace, num_nodes: int, waited_seconds: float
    ) -> list[TargetHandle]:
        """The session's own target, and others that would not finish it later, the best first.

        The remaining wait at its own target is unknown; it is assumed to be at least the time already waited: a session
        must not wait forever while another target is idle.
        """
        home, home_id = place.target, place.target.record.worker_id
        need = Need(len(session.tokens), session.num_remaining, {home_id: place.held}, home_id)
        at_home = home.expected_seconds(need)
        limit = at_home + max(waited_seconds, expected_wait(home.speed, home.num_running, at_home))
        others = [
            target
            for target in self.directory.matching(*session.required_target, session.max_length, num_nodes)
            if target is not home
            and target.is_usable_by(session.session_id)
            and not target.is_leaving
            and target.expected_seconds(need) <= limit
        ]
        return [home, *sorted(others, key=lambda target: target.expected_seconds(need))]

    @contextmanager
    def _waiting(self, session: Session) -> Iterator[None]:
        """Count the session as waiting, and deduct the time that the block takes from its budget for that."""
        self.num_waiting += 1
        try:
            with session.deadline.waiting():
                yield
        finally:
            self.num_waiting -= 1

    async def _recover(
        self, session: Session, place: TargetPlace, num_nodes: int, trouble: _Trouble, exc: BoughError
    ) -> None:
        """Return once the call is worth another try, at the same target or at another one."""
        since = time.monotonic() - trouble.away_seconds
        while time.monotonic() - trouble.began < RETRY_SECONDS:
            await trouble.pause()
            if await _still_answers(place.target):
                return  # with the same epoch and round, which it answers again if already verified
        self._blame(session, place.target, trouble, exc)
        if isinstance(exc, NoAnswer) and exc.was_connected and trouble.num_in_row == MOST_TARGETS - 1:
            await asyncio.sleep(DOUBT_SECONDS)
            since += DOUBT_SECONDS
        while (target := await self._successor(session, place.target, num_nodes, trouble, exc)) is None:
            if time.monotonic() - since > self.config.failover_timeout:
                raise Unavailable(
                    f"{exc}; no target with this model could be used for {self.config.failover_timeout:g} s"
                ) from exc
            await trouble.pause()
        trouble.away_seconds = time.monotonic() - since
        if target is not place.target:
            await self._move(session, place, target, exc)

    def _blame(self, session: Session, target: TargetHandle, trouble: _Trouble, exc: BoughError) -> None:
        """Decide whose fault it is: the target's if it does not answer or refuses, otherwise perhaps this call's.

        Raises BoughError if it is this call's, which must not be tried at further targets or repeated.
        """
        target.health.blame(session.session_id, exc)
        if not isinstance(exc, Unavailable):
            trouble.failed_at.add(target.record.worker_id)
        self._note_loss(target.record.worker_id, trouble, exc)
        trouble.count(exc)
        if trouble.is_own_fault:
            where = (
                f"{MOST_TARGETS} targets in a row" if trouble.num_in_row >= MOST_TARGETS else f"{MOST_IN_ALL} targets"
            )
            raise BoughError(f"this request has failed at {where}, the last with: {exc}") from exc

    def _note_loss(self, worker_id: str, trouble: _Trouble, exc: BoughError) -> None:
        """Restart the call's count if targets were lost without it since it was last counted."""
        if not isinstance(exc, NoAnswer):
            return
        self._lost_at.setdefault(worker_id, time.monotonic())
        if len(self._lost_at) > MOST_REMEMBERED:
            del self._lost_at[next(iter(self._lost_at))]
        trouble.lost_with.add(worker_id)
        if any(at > trouble.counted_at and name not in trouble.lost_with for name, at in self._lost_at.items()):
            trouble.num_in_row = 0
        trouble.counted_at = time.monotonic()

    async def _successor(
        self, session: Session, lost: TargetHandle, num_nodes: int, trouble: _Trouble, exc: BoughError
    ) -> TargetHandle | None:
        """A target that gives the same tokens as the failed one, possibly that one restarted; None for now.

        It must have just answered: if it stops answering during the next call, that call may be the cause. Raises
        BoughError if the call has failed at every target.
        """
        matching = self.directory.matching(*session.required_target, session.max_length, num_nodes)
        untried = [target for target in matching if target.record.worker_id not in trouble.failed_at]
        if trouble.failed_at and not untried:
            raise BoughError(f"this request fails at every target with its model, the last with: {exc}") from exc
        usable = [target for target in untried if target.is_usable]
        if not usable:
            return None
        need = Need(len(session.tokens), session.num_remaining, {})
        target = min(
            usable, key=lambda known: (known is lost, known.is_leaving, known.expected_seconds(need), known.busyness)
        )
        with TargetPlace(target):  # counts meanwhile: sessions that choose at the same moment must see each other
            has_answered = await _still_answers(target)
        if not has_answered:
            target.health.lost()
        elif not weights_differ(session.weights_hash, target.info.weights_hash):
            return target
        return None

    async def _move(self, session: Session, place: TargetPlace, target: TargetHandle, exc: BoughError) -> None:
        """Move the session; the other target needs only its tokens, and computes them again."""
        # It may still have a slot there. Use the earlier epoch: the process at its address may be the new target.
        self.endings.let_go(session, place.target, place)
        lost_id, new_id = place.target.record.worker_id, target.record.worker_id
        place.move(target)  # before any wait: others must see it
        await self.claims.renew(session)
        logger.warning("session %s moves from %s to %s", session.session_id, lost_id, new_id)
        session.warn(f"{lost_id} failed ({exc}): {new_id} has taken over")
        moved = {"bough.from": lost_id, "bough.to": new_id, "error.type": type(exc).__name__}
        session.span.event("failover", moved)
        session.num_failovers += 1


async def _still_answers(target: TargetHandle) -> bool:
    """Whether the target answers, and is still the same process."""
    try:
        info = await target.client.info()
    except BoughError:
        return False
    target.learn(info)
    return info.worker_id == target.record.worker_id
