"""The life of a process: signals, exit codes, and serving a worker."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext, suppress
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import grpc

from bough import __version__
from bough.concurrency.tasks import end
from bough.config.addresses import advertised_host, joined
from bough.config.processes import ServiceConfig, WorkerConfig
from bough.errors import BoughError, Unavailable
from bough.pb import common_pb2
from bough.processes.child import process_name
from bough.processes.compatibility import check_compatibility
from bough.processes.startup import ready, stage
from bough.protocol import codec
from bough.protocol.codec_fields import to_fields
from bough.protocol.messages import WorkerInfo
from bough.registry.heartbeat import registered
from bough.registry.records import WorkerLoad, WorkerRecord
from bough.registry.registry import Registry
from bough.rpc.drain import SessionGate
from bough.rpc.server import Served, serving
from bough.runtime.allocator import configure_allocator, trim_heap
from bough.security.access import Access
from bough.security.guarded import guards_of, require_guarded
from bough.telemetry.spans import NO_TRACER, Tracer
from bough.telemetry.tracing import tracing
from bough.tokenization.vocabulary import TokenizerFiles

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Config = TypeVar("Config", bound=ServiceConfig)

LOOPBACK = "127.0.0.1"
EXIT_CONFIG = 2
WATCH_SECONDS = 5.0  # between two checks of a worker
EXIT_SIGNAL = 128  # plus the signal's number, as in a shell


def run(main: Callable[[], Coroutine[None, None, None]]) -> None:
    """Run a process to its end. A BoughError is printed as one line on standard error, with exit status 2."""
    configure_allocator()
    try:
        asyncio.run(main())
    except BoughError as exc:
        print(f"error: {exc}", file=sys.stderr)
        raise SystemExit(EXIT_CONFIG) from exc


def stop_event() -> asyncio.Event:
    """An event set by the first SIGTERM or SIGINT; the second one exits at once."""
    event = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if event.is_set():
            os._exit(EXIT_SIGNAL + number)
        event.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    return event


async def exit_if_stopped(stop: asyncio.Event, step: Awaitable[Result]) -> Result:
    """Await a step of the start; if `stop` is set first, exit at once, as no caller depends on the process yet."""
    working, stopping = asyncio.ensure_future(step), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            os._exit(0)  # a normal exit would wait for the thread that loads the model
        return await working
    finally:
        await end(working, stopping)


def new_worker_id(kind: str) -> str:
    """A globally unique worker id."""
    return f"{kind}-{process_name(os.getpid())}-{uuid.uuid4().hex[:8]}"


def advertised(config: ServiceConfig, port: int) -> str:
    """The address at which others reach a process; `advertised_host` finds the host."""
    return joined(advertised_host(config), config.advertise_port or port)


def metrics_at(config: ServiceConfig, port: int) -> str:
    """The address of a process's metrics, with https:// for TLS; empty if `port` is negative, which serves none."""
    scheme = "https://" if config.tls_cert else ""
    return f"{scheme}{joined(advertised_host(config), port)}" if port >= 0 else ""


def for_metrics(config: Config) -> Config:
    """Settings of the metrics server: loopback only if keys or certificates are required, unless --open-metrics is."""
    is_local = bool(guards_of(config)) and not config.open_metrics
    return replace(config, host=LOOPBACK, advertise=LOOPBACK) if is_local else config


async def with_advertised_host(config: Config) -> Config:
    """Settings with the advertised host resolved, off the event loop. Raises ConfigError."""
    return replace(config, advertise=await asyncio.to_thread(advertised_host, config))


class Worker(Protocol):
    """A loaded draft or target worker."""

    tokenizer: TokenizerFiles

    @property
    def metrics_port(self) -> int:
        """The port of /metrics; -1 if not served."""

    def info(self) -> WorkerInfo:
        """Model, limits and load."""

    def load(self) -> WorkerLoad:
        """The load to report to the index."""

    def release(self, session_id: str, epoch: int) -> Future[None]:
        """Forget a session, unless a newer epoch has begun; 0 does not care."""

    def close(self) -> None:
        """End its threads."""


@runtime_checkable
class Draining(Protocol):
    """A worker that must finish or hand over work before it is closed."""

    def drain(self) -> Future[None]:
        """Refuse new sessions; the future is done when no work remains."""


@runtime_checkable
class Watched(Protocol):
    """A worker that can stall without an error."""

    def trouble(self) -> str:
        """Why it does not answer; empty if it does."""


AnyWorker = TypeVar("AnyWorker", bound=Worker)


class WorkerService(Generic[AnyWorker]):
    """The gRPC calls common to both workers; UNAVAILABLE while the model loads."""

    def __init__(self, crossed: Callable[[], AbstractAsyncContextManager[None]] = nullcontext) -> None:
        """`crossed` is a simulated network around a draft's or target's own call."""
        self.crossed = crossed
        self.loaded: AnyWorker | None = None
        self.tracer: Tracer = NO_TRACER

    @property
    def worker(self) -> AnyWorker:
        if self.loaded is None:
            raise Unavailable("this worker is still loading its model; try again when its health is SERVING")
        return self.loaded

    async def GetServerInfo(
        self, request: common_pb2.GetServerInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> common_pb2.WorkerInfo:
        """Model, tokenizer and limits."""
        return common_pb2.WorkerInfo(**to_fields(self.worker.info()))

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[common_pb2.TokenizerChunk]:
        """The tokenizer, in chunks."""
        for chunk in codec.tokenizer_to_wire(self.worker.tokenizer):
            yield chunk

    async def Release(
        self, request: common_pb2.ReleaseRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> common_pb2.ReleaseReply:
        """Forget a session."""
        await asyncio.wrap_future(self.worker.release(request.session_id, request.epoch))
        return common_pb2.ReleaseReply()


async def serve_worker(
    config: WorkerConfig,
    kind: str,
    worker_id: str,
    service: str,
    servicer: WorkerService[AnyWorker],
    add: Callable[[Any, grpc.aio.Server], None],
    load: Callable[[], AnyWorker],
) -> None:
    """Run a worker: listen, load off the event loop, check compatibility, register, serve, and drain when stopped.

    Raises:
        ConfigError, CheckpointError, PairingError, Unavailable: the worker could not start.
    """
    require_guarded(config)
    stop, access = stop_event(), Access.of(config)
    gate = SessionGate("Verify", "Grow")
    async with AsyncExitStack() as stack:
        servicer.tracer = await stack.enter_async_context(tracing(config, f"{kind}-worker", worker_id))
        registry = Registry(config.index_url, config.namespace)
        stack.push_async_callback(registry.close)
        stage("waiting for the index")
        await exit_if_stopped(stop, registry.wait())
        config = await exit_if_stopped(stop, with_advertised_host(config))
        age, add_servicer = config.max_connection_age, lambda server: add(servicer, server)
        serves = serving(
            config.host,
            config.port,
            service,
            add_servicer,
            gate,
            max_connection_age=age,
            auth_interceptors=access.auth_interceptors,
            credentials=access.worker_credentials,
        )
        await stack.enter_async_context(access.watching())
        served = await stack.enter_async_context(serves)
        stage("loading the model")
        worker = await exit_if_stopped(stop, asyncio.to_thread(load))
        stack.callback(worker.close)
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


async def watch(worker: Worker, served: Served, stop: asyncio.Event, every_seconds: float = WATCH_SECONDS) -> None:
    """Until `stop` is set, report health NOT_SERVING while a worker is in trouble."""
    was_well = True
    while not stop.is_set():
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), every_seconds)
        trouble = worker.trouble() if isinstance(worker, Watched) else ""
        if was_well == bool(trouble):
            was_well = not trouble
            logger.warning("%s", trouble or "the worker has recovered")
            await served.set_ready(was_well)


async def drain_worker(served: Served, worker: Worker, kind: str, timeout_seconds: float) -> None:
    """Let running requests finish, then drain the worker itself, all within the timeout."""
    deadline = time.monotonic() + timeout_seconds
    await served.drain(f"this {kind} worker is draining; use another {kind} worker", timeout_seconds)
    if isinstance(worker, Draining):
        draining = asyncio.wrap_future(worker.drain())
        await asyncio.wait({draining}, timeout=max(0.0, deadline - time.monotonic()))  # does not cancel it
