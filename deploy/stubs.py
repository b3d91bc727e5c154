"""The calls that a supervisor makes to its program: decode, call, encode."""

from __future__ import annotations

import grpc

from bough import wire, wire_generation
from bough.generation import Loads
from bough.messages import WorkerInfo
from bough.pb import common_pb2, draft_pb2_grpc, generation_pb2, generation_pb2_grpc, target_pb2_grpc
from bough.status import to_error
from deploy.settings import Role


async def get_loads(channel: grpc.aio.Channel, address: str, timeout_seconds: float) -> Loads:
    """What an orchestrator is doing. Raises the error that its answer, or its silence, means."""
    stub = generation_pb2_grpc.GenerationStub(channel)
    try:
        reply = await stub.GetLoads(generation_pb2.GetLoadsRequest(), timeout=timeout_seconds)
    except grpc.aio.AioRpcError as exc:
        raise to_error(exc, address) from exc
    return wire_generation.loads_from_wire(reply)


async def get_worker_info(channel: grpc.aio.Channel, role: Role, address: str, timeout_seconds: float) -> WorkerInfo:
    """What a worker is doing. Raises the error that its answer, or its silence, means."""
    stub = target_pb2_grpc.TargetStub(channel) if role is Role.TARGET else draft_pb2_grpc.DraftStub(channel)
    try:
        reply = await stub.GetServerInfo(common_pb2.GetServerInfoRequest(), timeout=timeout_seconds)
    except grpc.aio.AioRpcError as exc:
        raise to_error(exc, address) from exc
    return wire.info_from_wire(reply)
