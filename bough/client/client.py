"""A client for applications.

async with Client("127.0.0.1:7411") as client:
    async for event in client.generate(ChatPrompt((Message("user", "Why is the sky blue?"),))):
        if isinstance(event, Tokens):
            print(event.text, end="", flush=True)
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from types import TracebackType
from typing import Any, TypeVar

import grpc

from bough.client.resumable_stream import Patience, ResumableStream
from bough.errors import BoughError, ConfigError, Exhausted, NotFound, Unavailable
from bough.pb import common_pb2, generation_pb2_grpc
from bough.pb import generation_pb2 as pb
from bough.protocol import codec_generation as wire
from bough.protocol import generation as g
from bough.protocol.codec_costs import decisions_from_wire
from bough.protocol.decision import Decision, DraftCalibration
from bough.rpc.status_map import to_error
from bough.security.bearer import credentials, require_key
from bough.security.certificates import CertificateFiles
from bough.security.secured import Secured, environment_files
from bough.security.tls import PeerChannel
from bough.trees.acceptance import SchemeAcceptance

KEY_VARIABLE = "BOUGH_API_KEY"
DEFAULT_OPTIONS = g.GenerateOptions()
INFO_TIMEOUT_SECONDS = 10.0
PATIENCE_SECONDS = 60.0
START_PATIENCE_SECONDS = 3.0  # with orchestrators none of which has answered yet

Reply = TypeVar("Reply")


class Client:
    """Talks to an orchestrator, or to whichever of several answers.

    What the server refuses is raised as the errors of `bough.errors`.
    """

    def __init__(
        self,
        *addresses: str,
        patience_seconds: float = PATIENCE_SECONDS,
        api_key: str | None = None,
        certificates: CertificateFiles | None = None,
    ) -> None:
        """A stream that breaks is gone on with until for `patience_seconds` after that nothing more has come.

        `api_key` is shown to orchestrators that ask for one; the variable BOUGH_API_KEY has it by default. TLS is
        spoken to an address such as grpcs://10.0.0.1:7411, and to all where `certificates` name an authority; the
        variables BOUGH_TLS_CA, BOUGH_TLS_CERT and BOUGH_TLS_KEY name the files by default.
        """
        if not addresses or not all(addresses):
            raise ConfigError(f"addresses: {', '.join(addresses)!r}; one or more such as 127.0.0.1:7411 would do")
        key = require_key("api_key", os.environ.get(KEY_VARIABLE, "") if api_key is None else api_key)
        secured = Secured.by(environment_files() if certificates is None else certificates)
        self._servers = [_Server(secured.channel(address), key) for address in addresses]  # the one in use first
        self._patience_seconds = patience_seconds
        self._is_closed = False

    @property
    def address(self) -> str:
        """Of the orchestrator in use."""
        return self._servers[0].address

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connections; streams that are open end with them."""
        self._is_closed = True
        for server in self._servers:
            await server.channel.close()

    async def generate(self, prompt: g.Prompt, options: g.GenerateOptions = DEFAULT_OPTIONS) -> AsyncGenerator[g.Event]:
        """Events of one request: Started, then Tokens once a round, then Finished.

        A stream that breaks is resumed from the last token seen, at another address where there is one: nothing is lost
        or comes twice, and the last event's warnings tell of it. Where there is no room the call is made again when the
        server says. Leaving the loop early ends the request at the server too.
        """
        stream, patience = ResumableStream(options), Patience()
        is_known = False  # somebody there has answered
        while True:
            server = self._servers[0]
            try:
                async with aclosing(server.generate(prompt, stream.next_options())) as events:
                    async for event in events:
                        is_known = True
                        if (fresh := stream.take(event)) is not None:  # that it was begun again is no progress
                            patience.renew()
                            yield fresh
                return
            except (Unavailable, Exhausted) as exc:
                if self._is_closed:
                    raise
                is_known = is_known or isinstance(exc, Exhausted)
                stream.broke(exc)
                self._turn_from(server)
                most_seconds = self._patience_seconds
                await patience.wait(exc, most_seconds if is_known else min(START_PATIENCE_SECONDS, most_seconds))

    async def abort(self, request_id: str) -> None:
        """Ends a request, wherever it runs; its stream finishes with reason "abort". Raises NotFound."""
        request, problem = pb.AbortRequest(request_id=request_id), None
        for server in self._servers:
            try:
                await server.call(server.stub.Abort, request)
                return
            except (NotFound, Unavailable) as exc:
                problem = exc if problem is None or isinstance(exc, NotFound) else problem
        assert problem is not None, "there is a server, and it has not agreed"
        raise problem

    async def close_session(self, session_id: str) -> None:
        """Forgets a session before its time; a request that runs in it ends with StaleEpoch. Raises NotFound."""
        await self._ask(lambda stub: stub.CloseSession, pb.CloseSessionRequest(session_id=session_id))

    async def models(self) -> tuple[g.ModelInfo, ...]:
        """All models that are served, by name; at least one. Raises Unavailable where there is none."""
        return wire.models_from_wire(await self._ask(lambda stub: stub.GetModelInfo, pb.GetModelInfoRequest()))

    async def model_info(self) -> g.ModelInfo:
        """The model that is served; the first by name where there are several."""
        return (await self.models())[0]

    async def server_info(self) -> g.ServerInfo:
        """The orchestrator and its workers."""
        reply = await self._ask(lambda stub: stub.GetServerInfo, common_pb2.GetServerInfoRequest())
        return wire.server_info_from_wire(reply)

    async def loads(self) -> g.Loads:
        """What is running now."""
        return wire.loads_from_wire(await self._ask(lambda stub: stub.GetLoads, pb.GetLoadsRequest()))

    async def acceptance(self) -> tuple[SchemeAcceptance, ...]:
        """How many guesses were accepted, by scheme, depth and rank; for `bough.trees.acceptance`."""
        return wire.acceptance_from_wire(await self._ask(lambda stub: stub.GetAcceptance, pb.GetAcceptanceRequest()))

    async def calibrations(self) -> tuple[DraftCalibration, ...]:
        """What each draft worker's trees were expected to come to, and what they came to."""
        return wire.calibrations_from_wire(await self._ask(lambda stub: stub.GetAcceptance, pb.GetAcceptanceRequest()))

    async def decisions(self, session_id: str = "") -> tuple[Decision, ...]:
        """Why the last trees of a session were as large as they were, oldest first.

        `session_id` may also be the id of a request that ran in it, as `Started` has it; empty is the last session at
        work.

        Raises:
            NotFound: the orchestrator remembers nothing of it.
        """
        request = pb.GetDecisionsRequest(session_id=session_id)
        return decisions_from_wire(await self._ask(lambda stub: stub.GetDecisions, request))

    async def _ask(self, method: Callable[[Any], Callable[..., Awaitable[Reply]]], request: object) -> Reply:
        """The first answer of any of them."""
        for _ in self._servers[1:]:
            server = self._servers[0]
            try:
                return await server.call(method(server.stub), request)
            except Unavailable:
                self._turn_from(server)
        server = self._servers[0]
        return await server.call(method(server.stub), request)

    def _turn_from(self, server: _Server) -> None:
        """The next call goes to another one, unless another stream has seen to that already."""
        server.channel.refresh()
        if self._servers[0] is server:
            self._servers.append(self._servers.pop(0))


class _Server:
    """One orchestrator."""

    def __init__(self, channel: PeerChannel, api_key: str) -> None:
        self.channel, self._metadata = channel, credentials(api_key)

    @property
    def address(self) -> str:
        return self.channel.address

    @property
    def stub(self) -> generation_pb2_grpc.GenerationStub:
        """For the next call."""
        return generation_pb2_grpc.GenerationStub(self.channel.current)

    async def generate(self, prompt: g.Prompt, options: g.GenerateOptions) -> AsyncGenerator[g.Event]:
        """The events of one call. Raises Unavailable where it ends before its last event."""
        call = self.stub.Generate(wire.request_to_wire(prompt, options), metadata=self._metadata)
        try:
            async for message in call:
                event = wire.event_from_wire(message)
                yield event
                if isinstance(event, g.Finished):
                    return
        except grpc.aio.AioRpcError as exc:
            raise self._error(exc) from exc
        finally:
            call.cancel()
        raise Unavailable(f"{self.address} ended the stream before its last event")

    async def call(self, method: Callable[..., Awaitable[Reply]], request: object) -> Reply:
        """A call with one answer."""
        try:
            return await method(request, timeout=INFO_TIMEOUT_SECONDS, metadata=self._metadata)
        except grpc.aio.AioRpcError as exc:
            raise self._error(exc) from exc

    def _error(self, exc: grpc.aio.AioRpcError) -> BoughError:
        return to_error(exc, self.address)
