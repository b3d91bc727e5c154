"""gRPC stubs and handlers for the services of `proto/`, made from their descriptors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, TypeAlias

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from bough.pb import draft_pb2, generation_pb2, stage_pb2, target_pb2

ServicerContext: TypeAlias = grpc.aio.ServicerContext[Any, Any]  # of any call

DRAFT: ServiceDescriptor = draft_pb2.DESCRIPTOR.services_by_name["Draft"]
GENERATION: ServiceDescriptor = generation_pb2.DESCRIPTOR.services_by_name["Generation"]
STAGES: ServiceDescriptor = stage_pb2.DESCRIPTOR.services_by_name["Stages"]
TARGET: ServiceDescriptor = target_pb2.DESCRIPTOR.services_by_name["Target"]


def _kind(method: MethodDescriptor) -> str:
    """What gRPC calls this kind of method, such as "unary_stream"."""
    return "_".join("stream" if has else "unary" for has in (method.client_streaming, method.server_streaming))


def stub_of(service: ServiceDescriptor, channel: Any) -> Any:
    """The methods of a service, by name, as calls over a channel of `grpc` or `grpc.aio`."""
    calls = {}
    for method in service.methods:
        calls[method.name] = getattr(channel, _kind(method))(
            f"/{service.full_name}/{method.name}",
            request_serializer=GetMessageClass(method.input_type).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
            _registered_method=True,
        )
    return SimpleNamespace(**calls)


def add_service(
    service: ServiceDescriptor,
    servicer: object,
    server: grpc.aio.Server,
    decoders: Mapping[str, Callable[[bytes], Any]] = MappingProxyType({}),
) -> None:
    """Register with a server the methods of a service that `servicer` has, by the same names.

    `decoders` decode the requests of their methods; protobuf decodes all others.
    """
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in service.methods:
        make = getattr(grpc, f"{_kind(method)}_rpc_method_handler")
        if (answer := getattr(servicer, method.name, None)) is not None:
            handlers[method.name] = make(
                answer,
                request_deserializer=decoders.get(method.name, GetMessageClass(method.input_type).FromString),
                response_serializer=GetMessageClass(method.output_type).SerializeToString,
            )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
    server.add_registered_method_handlers(service.full_name, handlers)
