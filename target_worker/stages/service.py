"""The gRPC service of head and stages."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from bough.errors import NotFound
from bough.pb import stage_pb2
from bough.rpc.services import ServicerContext
from target_worker.stages import codec
from target_worker.stages.ring import Ring
from target_worker.stages.roster import Roster


class StagesService:
    """Implements bough.v1.Stages, at the head with its list of stages."""

    def __init__(self, ring: Ring, roster: Roster | None = None) -> None:
        self._ring, self._roster = ring, roster

    async def Join(self, request: stage_pb2.JoinRequest, context: ServicerContext) -> stage_pb2.JoinReply:
        """Register a stage, or keep its place."""
        call = codec.join_from_wire(request)
        if self._roster is None:
            raise NotFound("--stage-of", "must be the address of the head, got that of a stage")
        return codec.join_reply_to_wire(self._roster.join(call))

    async def Pass(self, messages: AsyncGenerator[stage_pb2.PassRequest, None], context: ServicerContext) -> None:
        """Serve the predecessor in the ring."""
        await self._ring.Pass(messages, context)
