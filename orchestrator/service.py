"""gRPC service of generation: decode, call, encode."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing
from functools import partial

import grpc

from bough.config.processes import OrchestratorConfig
from bough.errors import InvalidRequest, Unavailable
from bough.pb import common_pb2
from bough.pb import generation_pb2 as pb
from bough.protocol import codec_generation as wire
from bough.protocol.codec_fields import to_fields
from bough.protocol.generation import GenerateOptions, Prompt, PromptLogprobs
from bough.protocol.sampling_params import MAX_BIASES, MAX_CHOICES, MAX_STOP_TOKENS, MAX_STOPS
from bough.rpc.list_lengths import list_lengths
from bough.rpc.server import Served, serving
from bough.rpc.services import GENERATION, ServicerContext, add_service
from bough.security.auth_interceptor import AuthInterceptor, authorization
from orchestrator.cluster.served_models import largest_context, largest_vocabulary
from orchestrator.serving.tenants import Callers, Tenant

MANY_ENTRIES = 4096  # of all lists of a request; more are converted in a thread
MOST_FIELDS = 32768  # of a serialized request; counting them takes the event loop some 40 ms


class GenerationService:
    """Implements bough.v1.Generation, whose calls `proto/generation.proto` describes."""

    def __init__(self, callers: Callers) -> None:
        self._callers, self._requests = callers, callers.requests

    def decode(self, data: bytes) -> pb.GenerateRequest:
        """Decode a request of Generate.

        Raises InvalidRequest for what no target accepts and Unavailable if none is known, before it is decoded.
        """
        directory = self._requests.directory
        if not directory.seen:
            raise Unavailable(directory.why_no_target())
        require_lengths(data, largest_context(directory))
        return pb.GenerateRequest.FromString(data)

    async def Generate(self, request: pb.GenerateRequest, context: ServicerContext) -> AsyncIterator[pb.GenerateEvent]:
        directory = self._requests.directory
        if has_many_entries(request):
            prompt, options = await directory.tokenizing.run(lambda: checked(request, largest_vocabulary(directory)))
        else:
            prompt, options = wire.request_from_wire(request)
        tenant = self._tenant(context)
        async with aclosing(tenant.generate(prompt, options, context.time_remaining())) as events:
            async for event in events:
                if isinstance(event, PromptLogprobs):  # of hundreds of tokens, each perhaps with dozens of alternatives
                    yield await asyncio.to_thread(wire.event_to_wire, event)
                else:
                    yield wire.event_to_wire(event)

    async def Abort(self, request: pb.AbortRequest, context: ServicerContext) -> pb.AbortReply:
        self._tenant(context).abort(request.request_id)
        return pb.AbortReply()

    async def CloseSession(self, request: pb.CloseSessionRequest, context: ServicerContext) -> pb.CloseSessionReply:
        await self._tenant(context).close_session(request.session_id)
        return pb.CloseSessionReply()

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: ServicerContext) -> pb.ModelInfo:
        return wire.models_to_wire(self._requests.models())

    async def GetServerInfo(self, request: common_pb2.GetServerInfoRequest, context: ServicerContext) -> pb.ServerInfo:
        return pb.ServerInfo(**to_fields(await self._requests.server_info()))

    async def GetLoads(self, request: pb.GetLoadsRequest, context: ServicerContext) -> pb.Loads:
        return pb.Loads(**to_fields(self._requests.loads()))

    async def GetAcceptance(self, request: pb.GetAcceptanceRequest, context: ServicerContext) -> pb.Acceptance:
        schemes, drafts = self._requests.acceptance(), self._requests.sizer.log.calibrations()
        return pb.Acceptance(schemes=map(to_fields, schemes), drafts=map(to_fields, drafts))

    async def GetDecisions(self, request: pb.GetDecisionsRequest, context: ServicerContext) -> pb.Decisions:
        return pb.Decisions(decisions=map(to_fields, self._tenant(context).decisions(request.session_id)))

    def _tenant(self, context: ServicerContext) -> Tenant:
        return self._callers.tenant(authorization(context.invocation_metadata()))


def require_lengths(data: bytes, largest_context: int) -> None:
    """Raise InvalidRequest if a list of a serialized request is longer than any target accepts."""
    lengths = list_lengths(data, pb.GenerateRequest, MOST_FIELDS)
    limits = (
        ("token_ids.ids", "token_ids", largest_context),
        ("chat.messages", "chat.messages", largest_context),
        ("resume.token_ids", "resume.token_ids", largest_context),
        ("speculation.growth.shape.parents", "speculation.growth.shape.parents", largest_context),
        ("stop", "stop", MAX_STOPS),
        ("sampling.stop_token_ids", "stop_token_ids", MAX_STOP_TOKENS),
        ("sampling.logit_bias", "logit_bias", MAX_BIASES),
        ("constraint.choices", "constraint.choices", MAX_CHOICES),
    )
    for path, name, most in limits:
        if lengths[path] > most:
            raise InvalidRequest(name, f"must have at most {most} entries", lengths[path])


def has_many_entries(request: pb.GenerateRequest) -> bool:
    """Whether converting a request takes long enough to delay streams."""
    shape = request.speculation.growth.shape
    lists = (request.token_ids.ids, request.chat.messages, request.resume.token_ids, shape.parents)
    return sum(map(len, lists)) > MANY_ENTRIES


def checked(request: pb.GenerateRequest, vocab_size: int) -> tuple[Prompt, GenerateOptions]:
    """Convert a request. Raises InvalidRequest for ids of no model, before they become objects ten times as large."""
    ids = request.token_ids.ids
    if ids and (largest := max(ids)) >= vocab_size:
        raise InvalidRequest("token_ids.ids", f"must be 0 to {vocab_size - 1}", largest)
    return wire.request_from_wire(request)


def serving_generation(
    config: OrchestratorConfig, callers: Callers, credentials: grpc.ServerCredentials | None = None
) -> AbstractAsyncContextManager[Served]:
    """Serve this service by gRPC during the block. Raises ConfigError if the port is in use."""
    service, requests = GenerationService(callers), callers.requests
    return serving(
        config.host,
        config.port,
        GENERATION.full_name,
        partial(add_service, GENERATION, service, decoders={"Generate": service.decode}),
        requests.call_limiter,
        config.stalled_timeout,
        max_connection_age=config.max_connection_age,
        auth_interceptors=[] if callers.keyring is None else [AuthInterceptor(callers.admit)],
        credentials=credentials,
    )
