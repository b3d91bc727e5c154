"""A client for applications.

async with Client("127.0.0.1:7411") as client:
    async for event in client.generate(ChatPrompt((Message("user", "Why is the sky blue?"),))):
        if isinstance(event, Tokens):
            print(event.text, end="", flush=True)
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from types import TracebackType

import grpc

from bough import generation as g
from bough import wire_generation as wire
from bough.acceptance import SchemeAcceptance
from bough.calibration import DraftCalibration
from bough.pb import common_pb2, generation_pb2_grpc
from bough.pb import generation_pb2 as pb
from bough.rpc import open_channel, to_error

DEFAULT_OPTIONS = g.GenerateOptions()
INFO_TIMEOUT_SECONDS = 10.0


class Client:
    """Talks to an orchestrator. What the server refuses is raised as the errors of `bough.errors`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = open_channel(address)
        self._stub = generation_pb2_grpc.GenerationStub(self._channel)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connection; streams that are open end with it."""
        await self._channel.close()

    async def generate(self, prompt: g.Prompt, options: g.GenerateOptions = DEFAULT_OPTIONS) -> AsyncIterator[g.Event]:
        """Events of one request: Started, then Tokens once a round, then Finished.

        Leaving the loop early ends the request at the server too.
        """
        call = self._stub.Generate(wire.request_to_wire(prompt, options))
        try:
            with self._errors():
                async for event in call:
                    yield wire.event_from_wire(event)
        finally:
            call.cancel()

    async def abort(self, request_id: str) -> None:
        """Ends a request; its stream finishes with reason "abort". Raises NotFound."""
        with self._errors():
            await self._stub.Abort(pb.AbortRequest(request_id=request_id), timeout=INFO_TIMEOUT_SECONDS)

    async def model_info(self) -> g.ModelInfo:
        """The model that is served."""
        with self._errors():
            reply = await self._stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=INFO_TIMEOUT_SECONDS)
        return wire.model_info_from_wire(reply)

    async def server_info(self) -> g.ServerInfo:
        """The orchestrator and its workers."""
        with self._errors():
            reply = await self._stub.GetServerInfo(common_pb2.GetServerInfoRequest(), timeout=INFO_TIMEOUT_SECONDS)
        return wire.server_info_from_wire(reply)

    async def loads(self) -> g.Loads:
        """What is running now."""
        with self._errors():
            reply = await self._stub.GetLoads(pb.GetLoadsRequest(), timeout=INFO_TIMEOUT_SECONDS)
        return wire.loads_from_wire(reply)

    async def acceptance(self) -> tuple[SchemeAcceptance, ...]:
        """Which guesses were accepted, by scheme, depth and rank; `bough.acceptance` makes probabilities of it."""
        with self._errors():
            reply = await self._stub.GetAcceptance(pb.GetAcceptanceRequest(), timeout=INFO_TIMEOUT_SECONDS)
        return wire.acceptance_from_wire(reply)

    async def calibrations(self) -> tuple[DraftCalibration, ...]:
        """What each draft worker's trees were expected to come to, and what they came to."""
        with self._errors():
            reply = await self._stub.GetAcceptance(pb.GetAcceptanceRequest(), timeout=INFO_TIMEOUT_SECONDS)
        return wire.calibrations_from_wire(reply)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as exc:
            raise to_error(exc, self.address) from exc
