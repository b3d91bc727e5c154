"""A draft or target worker as a process: the parts that both kinds share, and their server."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.descriptor import ServiceDescriptor

from bough import __version__
from bough.config.processes import WorkerConfig, parse
from bough.errors import Unavailable
from bough.grammar.allowed_tokens import Grammars
from bough.pb import common_pb2
from bough.processes.compatibility import check_compatibility
from bough.processes.process import (
    advertised,
    exit_if_stopped,
    for_metrics,
    metrics_at,
    new_worker_id,
    ready,
    stage,
    stop_event,
    with_advertised_host,
)
from bough.protocol import codec
from bough.protocol.codec_fields import to_fields
from bough.protocol.generation import WorkerInfo
from bough.protocol.ids import ScopedId
from bough.protocol.messages import GrowCall, VerifyCall
from bough.registry.records import WorkerLoad, WorkerRecord
from bough.registry.registry import Registry, registered
from bough.rpc.arrivals import WINDOW_BYTES
from bough.rpc.drain import SessionGate
from bough.rpc.server import Served, serving
from bough.rpc.services import ServicerContext, add_service
from bough.runtime.allocator import trim_heap
from bough.security.access import Access, metrics_context, require_guarded
from bough.telemetry.logs import configure_logging
from bough.telemetry.metrics import MetricsServer, metrics_note
from bough.telemetry.tracing import NO_TRACER, Tracer, tracing
from bough.tokenization.vocabulary import TokenizerFiles

logger = logging.getLogger(__name__)

WATCH_SECONDS = 5.0  # between two checks of a worker

Config = TypeVar("Config", bound=WorkerConfig)


class ServedWorker(ABC, Generic[Config]):
    """A loaded worker, real or simulated. Subclasses supply the model and the thread that computes."""

    kind: str  # "draft" or "target"
    tokenizer: TokenizerFiles
    vocab_size: int
    grammars: Grammars

    def __init__(self, config: Config, worker_id: str, name: str, metrics: MetricsServer) -> None:
        self._config, self._worker_id, self._name, self._metrics = config, worker_id, name, metrics
        self._metrics_note: tuple[str, ...] = ()  # where metrics are served; empty if they are not

    def _serve_metrics(self) -> None:
        """Serve metrics. Raises ConfigError if their port is in use."""
        reached = for_metrics(self._config)
        self._metrics.serve(reached.host, reached.metrics_port, metrics_context(reached))
        self._metrics_note = metrics_note(metrics_at(reached, self._metrics.port))

    @property
    def metrics_port(self) -> int:
        """The port of /metrics; -1 if not served."""
        return self._metrics.port

    def compile_grammar(self, call: GrowCall | VerifyCall) -> None:
        """Compile the grammar of a call before a pass needs it. May take a second; may be called on any thread.

        Raises:
            InvalidRequest: the grammar is invalid.
        """
        self.grammars.compile(call.sampling.grammar, call.context.cache_salt)

    @abstractmethod
    def info(self) -> WorkerInfo:
        """Model, limits and load."""

    def _info(self, **own: Any) -> WorkerInfo:
        """The fields of `info` that are common to all workers, and the worker's `own` fields."""
        return WorkerInfo(
            kind=self.kind,
            worker_id=self._worker_id,
            model_name=self._name,
            tokenizer_fingerprint=self.tokenizer.fingerprint,
            vocab_size=self.vocab_size,
            bough_version=__version__,
            **own,
        )

    @abstractmethod
    def load(self) -> WorkerLoad:
        """The load to report to the index."""

    @abstractmethod
    def release(self, session_id: ScopedId, epoch: int = 0) -> Future[None]:
        """Forget a session unless it has a newer epoch; epoch 0 always forgets."""

    def trouble(self) -> str:
        """Why the worker cannot answer, if calls raise no error; empty if it can."""
        return ""

    @abstractmethod
    def drain(self) -> Future[None]:
        """Refuse new sessions from now on; done when all calls are answered."""

    @abstractmethod
    def close(self) -> None:
        """End its threads."""


AnyWorker = TypeVar("AnyWorker", bound=ServedWorker[Any])


class WorkerService(Generic[AnyWorker]):
    """The gRPC calls common to both workers; UNAVAILABLE while the model loads."""

    def __init__(self, crossed: Callable[[], AbstractAsyncContextManager[None]] = nullcontext) -> None:
        """`crossed` is a simulated network around a draft's or target's own call."""
        self.crossed = crossed
        self.loaded: AnyWorker | None = None
        self.tracer: Tracer = NO_TRACER
        self.window_bytes = WINDOW_BYTES  # of each stream's receiver
        self.further: Sequence[tuple[ServiceDescriptor, object]] = ()  # services of the same server, with servicers

    def listens_at(self, address: str) -> None:
        """The server is open at this address; the model is not loaded yet."""

    @property
    def worker(self) -> AnyWorker:
        if self.loaded is None:
            raise Unavailable("this worker is still loading its model; try again when its health is SERVING")
        return self.loaded

    async def GetServerInfo(
        self, request: common_pb2.GetServerInfoRequest, context: ServicerContext
    ) -> common_pb2.WorkerInfo:
        """Model, tokenizer and limits."""
        return common_pb2.WorkerInfo(**to_fields(self.worker.info()))

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: ServicerContext
    ) -> AsyncIterator[common_pb2.TokenizerChunk]:
        """The tokenizer, in chunks."""
        for chunk in codec.tokenizer_to_wire(self.worker.tokenizer):
            yield chunk

    async def Release(self, request: common_pb2.ReleaseRequest, context: ServicerContext) -> common_pb2.ReleaseReply:
        """Forget a session."""
        await asyncio.wrap_future(self.worker.release(ScopedId.parse(request.session_id), request.epoch))
        return common_pb2.ReleaseReply()


Load = Callable[[], AnyWorker]
Parts = tuple[WorkerService[AnyWorker], Load[AnyWorker]]  # the servicer, and a function that loads the worker


async def serve_worker(
    kind_of_config: type[Config],
    service: ServiceDescriptor,
    model_parts: Callable[[Config, str], Parts[AnyWorker]],
    simulated_parts: Callable[[Config, str], Parts[AnyWorker]],
) -> None:
    """Run a worker: listen, load off the event loop, check compatibility, register, serve, and drain when stopped.

    Its settings come from the command line and the environment.

    Raises:
        ConfigError, CheckpointError, PairingError, Unavailable: the worker could not start.
    """
    kind = service.name.lower()
    config = parse(kind_of_config, f"{kind}_worker", sys.argv[1:], os.environ)
    configure_logging(config)
    stage("importing libraries")
    worker_id = new_worker_id(kind)
    servicer, load = (simulated_parts if config.simulate else model_parts)(config, worker_id)
    await run_worker(config, kind, worker_id, service, servicer, load, stop_event())


async def run_worker(
    config: WorkerConfig,
    kind: str,
    worker_id: str,
    service: ServiceDescriptor,
    servicer: WorkerService[AnyWorker],
    load: Load[AnyWorker],
    stop: asyncio.Event,
) -> None:
    """Run a worker with these parts until `stop` is set. Raises like `serve_worker`."""
    require_guarded(config)
    access = Access.of(config)
    gate = SessionGate("Verify", "Grow")
    async with AsyncExitStack() as stack:
        servicer.tracer = await stack.enter_async_context(tracing(config, f"{kind}-worker", worker_id))
        registry = Registry(config.index_url, config.namespace)
        stack.push_async_callback(registry.close)
        stage("waiting for the index")
        await exit_if_stopped(stop, registry.wait())
        config = await exit_if_stopped(stop, with_advertised_host(config))
        serves = serving(
            config.host,
            config.port,
            service.full_name,
            partial(_add_services, [(service, servicer), *servicer.further]),
            gate,
            max_connection_age=config.max_connection_age,
            auth_interceptors=access.auth_interceptors,
            credentials=access.worker_credentials,
            window_bytes=servicer.window_bytes,
        )
        await stack.enter_async_context(access.watching())
        served = await stack.enter_async_context(serves)
        servicer.listens_at(advertised(config, served.port))
        stage("loading the model")
        worker = await exit_if_stopped(stop, asyncio.to_thread(load))
        stack.push_async_callback(asyncio.to_thread, worker.close)  # waits for the running sweep or draft step
        trim_heap()
        stage("registering")
        await check_compatibility(registry, worker.info(), worker.tokenizer, access)
        servicer.loaded = worker
        metrics = metrics_at(for_metrics(config), worker.metrics_port)
        record = WorkerRecord(kind, worker_id, advertised(config, served.port), metrics=metrics)
        async with registered(registry, lambda: replace(record, load=worker.load())):
            await served.set_ready(True)
            ready()
            logger.info("bough %s: %s %s ready at %s", __version__, kind, worker_id, record.address)
            await watch(worker, served, stop)
            await served.leave()
        await drain_worker(served, worker, kind, config.drain_seconds)


def _add_services(services: Sequence[tuple[ServiceDescriptor, object]], server: grpc.aio.Server) -> None:
    for service, servicer in services:
        add_service(service, servicer, server)


async def watch(
    worker: ServedWorker[Any], served: Served, stop: asyncio.Event, every_seconds: float = WATCH_SECONDS
) -> None:
    """Until `stop` is set, report health NOT_SERVING while `trouble` names a problem."""
    was_well = True
    while not stop.is_set():
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), every_seconds)
        trouble = worker.trouble()
        if was_well == bool(trouble):
            was_well = not trouble
            logger.warning("%s", trouble or "the worker has recovered")
            await served.set_ready(was_well)


async def drain_worker(served: Served, worker: ServedWorker[Any], kind: str, timeout_seconds: float) -> None:
    """Let running requests finish, then drain the worker itself, all within the timeout."""
    deadline = time.monotonic() + timeout_seconds
    await served.drain(f"this {kind} worker is draining; use another {kind} worker", timeout_seconds)
    draining = asyncio.wrap_future(worker.drain())
    await asyncio.wait({draining}, timeout=max(0.0, deadline - time.monotonic()))  # does not cancel the drain
