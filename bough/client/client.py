"""A client for applications.

async with Client("127.0.0.1:7411") as client:
    async for event in client.generate(ChatPrompt((Message("user", "Why is the sky blue?"),))):
        if isinstance(event, Tokens):
            print(event.text, end="", flush=True)
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc

from bough.errors import BoughError, ConfigError, Exhausted, NoAnswer, NotFound, Unavailable
from bough.pb import common_pb2
from bough.pb import generation_pb2 as pb
from bough.protocol import codec_generation as wire
from bough.protocol import generation as g
from bough.protocol.codec_fields import read
from bough.protocol.decision import Decision, DraftCalibration
from bough.rpc.services import GENERATION, stub_of
from bough.rpc.status_map import to_error
from bough.security.certificates import CertificateFiles
from bough.security.keys import credentials, require_key
from bough.security.tls import PeerChannel, channels, environment_files
from bough.trees.scheme_acceptance import SchemeAcceptance

KEY_VARIABLE = "BOUGH_API_KEY"
DEFAULT_OPTIONS = g.GenerateOptions()
INFO_TIMEOUT_SECONDS = 10.0
PATIENCE_SECONDS = 60.0
START_PATIENCE_SECONDS = 3.0  # the limit before any orchestrator has answered
MOST_LOST = 2  # consecutive connections that a request may lose without a new token, as it may crash the servers
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 5.0

logger = logging.getLogger(__name__)


class ResumableStream:
    """Merges the calls of one request into one stream of events without repetitions."""

    def __init__(self, options: g.GenerateOptions) -> None:
        """Chooses a request id and a seed if not given, as all calls must use the same."""
        seed = secrets.randbits(64) if options.seed is None else options.seed
        self._options = replace(options, request_id=options.request_id or uuid.uuid4().hex, seed=seed)
        self._token_ids = list(options.resume.token_ids) if options.resume else []
        self._num_before = options.resume.num_tokens if options.resume else 0
        self._num_seen = self._num_before
        self._is_started = False
        self._is_broken = False
        self._num_calls = 0
        self._num_prompt = self._num_prompt_seen = 0  # prompt tokens with log-probabilities, of this call and of all
        self._seams: list[str] = []

    def next_options(self) -> g.GenerateOptions:
        """Options of the next call: the original ones first, later with the progress to resume from."""
        self._num_calls += 1
        if self._num_calls == 1:
            return self._options
        knows_all = len(self._token_ids) == self._num_seen
        return replace(self._options, resume=g.Resume(self._num_seen, tuple(self._token_ids) if knows_all else ()))

    def take(self, event: g.Event) -> g.Event | None:
        """The event for the caller; None for a repeated Started."""
        match event:
            case g.Started():
                self._is_broken, self._num_prompt = False, 0
                is_first, self._is_started = not self._is_started, True
                return event if is_first else None
            case g.PromptLogprobs():
                return self._new_of_prompt(event)
            case g.Tokens():
                self._token_ids += event.token_ids
                self._num_seen += len(event.token_ids)
                return event
            case g.Finished():
                return replace(event, warnings=(*self._seams, *event.warnings))

    def _new_of_prompt(self, event: g.PromptLogprobs) -> g.PromptLogprobs | None:
        """The part of `event` that no earlier call has reported; None if there is none."""
        num_known = min(max(0, self._num_prompt_seen - self._num_prompt), len(event.token_ids))
        self._num_prompt += len(event.token_ids)
        self._num_prompt_seen = max(self._num_prompt_seen, self._num_prompt)
        num_new = len(event.token_ids) - num_known
        if not num_new:
            return None
        logprobs = event.logprobs[max(0, len(event.logprobs) - num_new) :]
        return g.PromptLogprobs(event.token_ids[num_known:], logprobs)

    def broke(self, exc: BoughError) -> None:
        """Record that a call has failed; the first failure after each start adds a warning to Finished."""
        if self._is_started and not self._is_broken:
            num_tokens = self._num_seen - self._num_before
            self._seams.append(f"the stream broke after {num_tokens} tokens and was resumed: {exc}")
            self._is_broken = True


class RetryWindow:
    """Exponential backoff between attempts, limited in time since the first failure without progress."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Reset after progress."""
        self._num_lost = 0  # connections
        self._failed_at: float | None = None  # time of the first failure since progress, on the monotonic clock
        self._cause: Unavailable | Exhausted | None = None  # that failure; later ones are often its consequences
        self._pause_seconds = FIRST_PAUSE_SECONDS

    async def wait(self, exc: Unavailable | Exhausted, most_seconds: float, *, is_known: bool = True) -> None:
        """Sleep before the next attempt, for the time in the error if it has one.

        The first failure since progress is logged if a server `is_known`, that is, has answered before.

        Raises the first failure since progress if the sleep would end more than `most_seconds` after it, and NoAnswer
        if MOST_LOST connections were lost since.
        """
        self._num_lost += isinstance(exc, NoAnswer) and exc.was_connected
        if self._num_lost >= MOST_LOST:
            raise NoAnswer(
                f"{exc}; the request is not sent again, as its connection was lost {self._num_lost} times in a row "
                "without a new token",
                was_connected=True,
            ) from exc
        is_first = self._failed_at is None
        self._failed_at = self._failed_at or time.monotonic()
        self._cause = self._cause or exc
        requested = getattr(exc, "retry_seconds", None)
        # Jitter: clients that were disconnected together must not all return at once.
        seconds = requested if requested is not None else self._pause_seconds * random.uniform(0.5, 1.0)
        if time.monotonic() + seconds > self._failed_at + most_seconds:
            raise self._cause
        if is_first and is_known:
            what = "no capacity" if isinstance(exc, Exhausted) else "connection lost"
            logger.warning("%s, trying again for at most %g s: %s", what, most_seconds, exc)
        await asyncio.sleep(seconds)
        self._pause_seconds = min(2 * self._pause_seconds, LONGEST_PAUSE_SECONDS)


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

        A broken stream is resumed after the last received token, at another address if there is one. No token is lost
        or repeated; a warning is logged, and Finished has one too. A request that loses two servers without a new token
        is not sent to a third, which it might crash too. A server without capacity is called again after its retry
        delay. Leaving the loop early aborts the request.
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
                # Wait for several servers that refuse, as in a redeployment, but not for a single one.
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
