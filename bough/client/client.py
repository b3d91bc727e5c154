"""A client for applications.

async with Client("127.0.0.1:7411") as client:
    async for event in client.generate(ChatPrompt((Message("user", "Why is the sky blue?"),))):
        if isinstance(event, Tokens):
            print(event.text, end="", flush=True)
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc

from bough.client.resumable_stream import ResumableStream, RetryWindow
from bough.errors import ConfigError, Exhausted, NoAnswer, NotFound, Unavailable
from bough.pb import common_pb2
from bough.pb import generation_pb2 as pb
from bough.protocol import codec_generation as wire
from bough.protocol import generation as g
from bough.protocol.codec_fields import read
from bough.protocol.decision import Decision, DraftCalibration
from bough.rpc.services import GENERATION, stub_of
from bough.rpc.status_map import to_error
from bough.security.bearer import credentials, require_key
from bough.security.certificates import CertificateFiles
from bough.security.secured import channels, environment_files
from bough.security.tls import PeerChannel
from bough.trees.scheme_acceptance import SchemeAcceptance

KEY_VARIABLE = "BOUGH_API_KEY"
DEFAULT_OPTIONS = g.GenerateOptions()
INFO_TIMEOUT_SECONDS = 10.0
PATIENCE_SECONDS = 60.0
START_PATIENCE_SECONDS = 3.0  # the same limit before any orchestrator has answered


class Client:
    """A client of one orchestrator, or of several, of which it uses one that answers.

    Errors of the server are raised as those of `bough.errors`.
    """

    def __init__(
        self,
        *addresses: str,
        patience_seconds: float = PATIENCE_SECONDS,
        api_key: str | None = None,
        certificates: CertificateFiles | None = None,
    ) -> None:
        """A broken stream is resumed until nothing has arrived for `patience_seconds` after the break.

        `api_key` defaults to BOUGH_API_KEY. TLS is used for addresses such as grpcs://10.0.0.1:7411, and for all if
        `certificates` name an authority; they default to BOUGH_TLS_CA, BOUGH_TLS_CERT and BOUGH_TLS_KEY.
        """
        if not addresses or not all(addresses):
            raise ConfigError(f"addresses: must be one or more such as 127.0.0.1:7411, got {', '.join(addresses)!r}")
        key = require_key("api_key", os.environ.get(KEY_VARIABLE, "") if api_key is None else api_key)
        files = environment_files() if certificates is None else certificates
        self._servers = [_Orchestrator(channel, key) for channel in channels(files, *addresses)]  # the first is in use
        self._patience_seconds = patience_seconds
        self._is_closed = False

    @property
    def address(self) -> str:
        """The address of the orchestrator in use."""
        return self._servers[0].channel.address

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections and open streams."""
        self._is_closed = True
        for server in self._servers:
            await server.channel.close()

    async def generate(self, prompt: g.Prompt, options: g.GenerateOptions = DEFAULT_OPTIONS) -> AsyncGenerator[g.Event]:
        """The events of one request: Started, then Tokens for each round, then Finished.

        A broken stream is resumed after the last received token, at another address if there is one; no token is lost
        or repeated, a warning is logged, and Finished has one. A request that loses two servers without a new token is
        not sent to a third, which it might end too. A server without capacity is called again when it says. Leaving the
        loop early aborts the request.
        """
        stream, retry_window = ResumableStream(options), RetryWindow()
        is_known = False  # an orchestrator has answered
        while True:
            server = self._servers[0]
            try:
                async with aclosing(server.generate(prompt, stream.next_options())) as events:
                    async for event in events:
                        is_known = True
                        if (fresh := stream.take(event)) is not None:  # a repeated Started is no progress
                            retry_window.renew()
                            yield fresh
                return
            except (Unavailable, Exhausted) as exc:
                if self._is_closed:
                    raise
                # Several that refuse, as while they are redeployed, are waited for; one without a target says so soon.
                is_refusal = len(self._servers) > 1 and not isinstance(exc, NoAnswer)
                is_known = is_known or is_refusal or isinstance(exc, Exhausted)
                stream.broke(exc)
                self._turn_from(server)
                longest = self._patience_seconds
                most_seconds = longest if is_known else min(START_PATIENCE_SECONDS, longest)
                await retry_window.wait(exc, most_seconds, is_known=is_known)

    async def abort(self, request_id: str) -> None:
        """Abort a request at any address; its stream finishes with reason "abort". Raises NotFound."""
        request, problem = pb.AbortRequest(request_id=request_id), None
        for server in self._servers:
            try:
                await server.call("Abort", request)
                return
            except (NotFound, Unavailable) as exc:
                problem = exc if problem is None or isinstance(exc, NotFound) else problem
        assert problem is not None, "there is at least one server"
        raise problem

    async def close_session(self, session_id: str) -> None:
        """Close a session; a request running in it ends with StaleEpoch. Raises NotFound."""
        await self._ask("CloseSession", pb.CloseSessionRequest(session_id=session_id))

    async def models(self) -> tuple[g.ModelInfo, ...]:
        """All served models by name, at least one. Raises Unavailable if there is none."""
        return wire.models_from_wire(await self._ask("GetModelInfo", pb.GetModelInfoRequest()))

    async def model_info(self) -> g.ModelInfo:
        """The served model; the first by name if there are several."""
        return (await self.models())[0]

    async def server_info(self) -> g.ServerInfo:
        """Information about the orchestrator and its workers."""
        reply = await self._ask("GetServerInfo", common_pb2.GetServerInfoRequest())
        return read(reply, g.ServerInfo)

    async def loads(self) -> g.Loads:
        """The current load."""
        return read(await self._ask("GetLoads", pb.GetLoadsRequest()), g.Loads)

    async def acceptance(self) -> tuple[SchemeAcceptance, ...]:
        """Acceptance counts by scheme, depth and rank, for `bough.trees.acceptance`."""
        reply = await self._ask("GetAcceptance", pb.GetAcceptanceRequest())
        return tuple(read(one, SchemeAcceptance, "schemes.") for one in reply.schemes)

    async def calibrations(self) -> tuple[DraftCalibration, ...]:
        """Predicted and real outcomes of each draft worker's trees."""
        reply = await self._ask("GetAcceptance", pb.GetAcceptanceRequest())
        return tuple(read(one, DraftCalibration) for one in reply.drafts)

    async def decisions(self, session_id: str = "") -> tuple[Decision, ...]:
        """The decisions about a session's last trees, oldest first.

        `session_id` may also be the id of a request that ran in it; empty is the last active session.

        Raises:
            NotFound: the orchestrator has no decisions of it.
        """
        reply = await self._ask("GetDecisions", pb.GetDecisionsRequest(session_id=session_id))
        return tuple(read(one, Decision, "decisions.") for one in reply.decisions)

    async def _ask(self, method: str, request: object) -> Any:
        """Call a method of the server in use, and of the others in turn while they are Unavailable."""
        for _ in self._servers[1:]:
            server = self._servers[0]
            try:
                return await server.call(method, request)
            except Unavailable:
                self._turn_from(server)
        server = self._servers[0]
        return await server.call(method, request)

    def _turn_from(self, server: _Orchestrator) -> None:
        """Use another server for the next call, unless another stream has switched already."""
        server.channel.refresh()
        if self._servers[0] is server:
            self._servers.append(self._servers.pop(0))


class _Orchestrator:
    """One orchestrator."""

    def __init__(self, channel: PeerChannel, api_key: str) -> None:
        self.channel, self._metadata = channel, credentials(api_key)

    async def generate(self, prompt: g.Prompt, options: g.GenerateOptions) -> AsyncGenerator[g.Event]:
        """The events of one call. Raises Unavailable if it ends before Finished."""
        call = stub_of(GENERATION, self.channel.current).Generate(
            wire.request_to_wire(prompt, options), metadata=self._metadata
        )
        try:
            async for message in call:
                event = wire.event_from_wire(message)
                yield event
                if isinstance(event, g.Finished):
                    return
        except grpc.aio.AioRpcError as exc:
            raise to_error(exc, self.channel.address) from exc
        finally:
            call.cancel()
        raise Unavailable(f"{self.channel.address} ended the stream before its last event")

    async def call(self, method: str, request: object) -> Any:
        """A unary call."""
        call = getattr(stub_of(GENERATION, self.channel.current), method)
        try:
            return await call(request, timeout=INFO_TIMEOUT_SECONDS, metadata=self._metadata)
        except grpc.aio.AioRpcError as exc:
            raise to_error(exc, self.channel.address) from exc
