"""KV slots at targets: who waits for one, in which order, and at which of several targets."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from dataclasses import dataclass, field

from bough.config.processes import OrchestratorConfig
from bough.errors import BoughError, Exhausted, Preempted
from bough.trees.tree_plan import Scheme
from orchestrator.cluster.directory import Directory
from orchestrator.cluster.expected_wait import Need, expected_wait
from orchestrator.cluster.worker_clients import Answer, TargetClient
from orchestrator.cluster.worker_handle import WorkerHandle
from orchestrator.cluster.worker_health import is_fault
from orchestrator.opening.slot_queue import Place, SlotQueue
from orchestrator.opening.target_lease import TargetLease
from orchestrator.sessions.session import Session
from orchestrator.sizing.plans import Proposal

RETRY_SECONDS = 0.25  # between two questions for room


@dataclass(slots=True)
class Slots:
    """Has trees verified once there is room for their sessions.

    Whoever has no slot and is refused one waits, the oldest before the others among those whom the same targets can
    serve; so does whoever has had one that gave way. Only the first of them asks, without sending its context.
    It takes whichever target has room, unless it would rather wait for what its own one holds than compute it again.
    """

    config: OrchestratorConfig
    directory: Directory
    num_waiting: int = 0
    _lines: defaultdict[str, SlotQueue] = field(default_factory=lambda: defaultdict(SlotQueue))  # by identity

    async def verify(self, session: Session, seat: TargetLease, proposal: Proposal, scheme: Scheme) -> Answer:
        """The verdict of the seat's target, or of one with room, whose the seat is then.

        Raises:
            Exhausted: there was no room for as long as the request may wait, before it had any answer.
            BoughError: what the target answers.
        """
        line = self._lines[session.target_identity]
        # A session whose KV the target holds takes no room from those who wait: they may be waiting for its very slot.
        may_ask, num_refused = seat.has_slot or session.target_held > 0 or line.is_empty, 0
        while True:
            if may_ask:
                try:
                    answer = await self._verify(session, seat.target, proposal, scheme)
                    seat.has_slot = True
                    return answer
                except Preempted:
                    session.gave_way(seat.target.record.worker_id)
                    seat.has_slot = False
                except Exhausted:
                    if not session.slot_seconds:
                        raise
                    num_refused += 1
            self.num_waiting += 1
            try:
                with session.patience.waiting():
                    if seat.has_slot or num_refused > 1:  # all but the tree is there; or a promise was not kept
                        await asyncio.sleep(RETRY_SECONDS)
                    if not seat.has_slot and (answered := await self._turn(line, session, seat, proposal, scheme)):
                        return answered
            finally:
                self.num_waiting -= 1
            may_ask = True

    async def _verify(
        self, session: Session, target: WorkerHandle[TargetClient], proposal: Proposal, scheme: Scheme
    ) -> Answer:
        timeout_seconds = session.patience.within(self.config.target_timeout)
        return await target.client.verify(session, proposal, scheme, target.num_running, timeout_seconds)

    async def _turn(
        self, line: SlotQueue, session: Session, seat: TargetLease, proposal: Proposal, scheme: Scheme
    ) -> Answer | None:
        """Returns once a target has given the session a slot; with the verdict where that was all that was lacking."""
        deadline = time.monotonic() + session.slot_seconds
        with seat.given_up(), line.place(session.epoch) as place:
            answer = await self._first_with_room(session, seat, proposal, scheme, place, deadline)
        seat.has_slot = answer is not None
        return answer

    async def _first_with_room(
        self, session: Session, seat: TargetLease, proposal: Proposal, scheme: Scheme, place: Place, deadline: float
    ) -> Answer | None:
        began, home = time.monotonic(), seat.target
        refusal = Exhausted("KV memory: no target has room")
        while True:
            await place.first(deadline)
            for target in self._worth_asking(session, home, len(proposal.tree), time.monotonic() - began):
                timeout_seconds = session.patience.within(self.config.target_timeout)
                try:
                    held, answer = await target.client.reserve(
                        session, proposal, scheme, target.num_running + 1, timeout_seconds
                    )
                except Exhausted as exc:
                    refusal = exc
                    continue
                except BoughError as exc:
                    if target is home or not is_fault(exc):
                        raise
                    target.health.blame(session.session_id, exc)
                    continue
                seat.target, session.target_held = target, held
                return answer
            if time.monotonic() + RETRY_SECONDS > deadline:
                raise refusal
            await asyncio.sleep(RETRY_SECONDS)

    def _worth_asking(
        self, session: Session, home: WorkerHandle[TargetClient], num_nodes: int, waited_seconds: float
    ) -> list[WorkerHandle[TargetClient]]:
        """The session's own target and those where it would not be over later, the best first.

        What is left to wait at its own is not known for sure: at least as long as it has waited already, or a session
        would wait for ever beside a target that is idle.
        """
        home_id = home.record.worker_id
        need = Need(len(session.tokens), session.num_left, {home_id: session.target_held}, home_id)
        at_home = home.expected_seconds(need)
        limit = at_home + max(waited_seconds, expected_wait(home.pace, home.num_running, at_home))
        others = [
            target
            for target in self.directory.alike(*session.ground, session.max_length, num_nodes)
            if target is not home
            and target.is_usable_by(session.session_id)
            and not target.is_leaving
            and target.expected_seconds(need) <= limit
        ]
        return [home, *sorted(others, key=lambda target: target.expected_seconds(need))]
