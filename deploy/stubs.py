"""The gRPC calls of a supervisor to its program."""

from __future__ import annotations

import grpc

from bough.pb import common_pb2, draft_pb2_grpc, generation_pb2, generation_pb2_grpc, target_pb2_grpc
from bough.protocol.codec_fields import read
from bough.protocol.generation import Loads
from bough.protocol.messages import WorkerInfo
from bough.rpc.status_map import to_error
from deploy.settings import Role

Credentials = tuple[tuple[str, str], ...]


async def get_loads(channel: grpc.aio.Channel, address: str, timeout_seconds: float, shown: Credentials) -> Loads:
    """Ask an orchestrator for its load. Raise the error that its status, or a timeout, maps to."""
    stub = generation_pb2_grpc.GenerationStub(channel)
    try:
        reply = await stub.GetLoads(generation_pb2.GetLoadsRequest(), timeout=timeout_seconds, metadata=shown)
    except grpc.aio.AioRpcError as exc:
        raise to_error(exc, address) from exc
    return read(reply, Loads)


async def get_worker_info(
    channel: grpc.aio.Channel, role: Role, address: str, timeout_seconds: float, shown: Credentials
) -> WorkerInfo:
    """Ask a worker for its load. Raise the error that its status, or a timeout, maps to."""
    stub = target_pb2_grpc.TargetStub(channel) if role is Role.TARGET else draft_pb2_grpc.DraftStub(channel)
    try:
        request = common_pb2.GetServerInfoRequest()
        reply = await stub.GetServerInfo(request, timeout=timeout_seconds, metadata=shown)
    except grpc.aio.AioRpcError as exc:
        raise to_error(exc, address) from exc
    return read(reply, WorkerInfo)
