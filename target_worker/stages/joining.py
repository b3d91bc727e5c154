"""A stage's calls to its head: for a place, and then for as long as the process lives."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc

from bough.errors import ConfigError, InvalidRequest, NotFound, PairingError
from bough.rpc.services import STAGES, stub_of
from bough.rpc.status_map import to_error
from bough.security.access import Access
from target_worker.stages import codec
from target_worker.stages.roster import Assignment, JoinCall

logger = logging.getLogger(__name__)

JOIN_SECONDS = 2.0  # between two calls
TIMEOUT_SECONDS = 5.0  # of one call


class JoiningStage:
    """Keeps a stage's place at its head."""

    def __init__(
        self, access: Access, head: str, call: Callable[[], JoinCall], join_seconds: float = JOIN_SECONDS
    ) -> None:
        """`head` is its address; `call` returns what the stage says at the moment. Created on the event loop."""
        self.assigned: asyncio.Future[Assignment] = asyncio.get_running_loop().create_future()
        self._access, self._head, self._call, self._join_seconds = access, head, call, join_seconds
        self._state = ""  # logged last

    async def run(self) -> None:
        """Call until cancelled, also while the head is away.

        Raises:
            PairingError: names the fact in which this stage differs from the head.
            ConfigError: the head has restarted, and assigns other layers than those that this process has.
            InvalidRequest, NotFound: the head does not accept the call, or the address is not that of a head.
        """
        channel = self._access.channel(self._head)
        try:
            while True:
                await self._join(channel.current)
                await asyncio.sleep(self._join_seconds)
        finally:
            await channel.close()

    async def _join(self, channel: grpc.aio.Channel) -> None:
        request = codec.join_to_wire(self._call())
        try:
            reply = await stub_of(STAGES, channel).Join(
                request, timeout=TIMEOUT_SECONDS, metadata=self._access.credentials
            )
        except grpc.aio.AioRpcError as exc:
            if exc.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise NotFound("--stage-of", "must be the address of a target with --stages", self._head) from exc
            error = to_error(exc, f"the head at {self._head}")
            if isinstance(error, PairingError | InvalidRequest | NotFound):
                raise error from exc
            self._log(type(error).__name__, logging.WARNING, str(error))
            return
        answer = codec.join_reply_from_wire(reply)
        if isinstance(answer, Assignment):
            self._log("assigned", logging.INFO, f"stage {answer.number} of the head at {self._head}")
            self._accept(answer)
        else:
            missing = f"waits for {answer} more stages" if answer else "divides the layers"
            self._log(missing, logging.INFO, f"the head at {self._head} {missing}")

    def _accept(self, assignment: Assignment) -> None:
        if not self.assigned.done():
            self.assigned.set_result(assignment)
        elif assignment != self.assigned.result():
            raise ConfigError(
                f"the head at {self._head} assigns {assignment}, and this process has loaded {self.assigned.result()}; "
                "restart it, as a supervisor does"
            )

    def _log(self, state: str, level: int, text: str) -> None:
        """Log a text if the state is another than at the last call."""
        if state != self._state:
            self._state = state
            logger.log(level, "%s", text)
