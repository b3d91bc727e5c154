"""The life of a process: the stages of its start, signals, exit codes, its id and its addresses."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import TypeVar

from bough.concurrency.tasks import end
from bough.config.addresses import advertised_host, joined
from bough.config.processes import ServiceConfig
from bough.errors import BoughError, Unavailable
from bough.processes.child import process_name, start_ticks
from bough.runtime.allocator import configure_allocator
from bough.runtime.exit_status import EXIT_SIGNAL, status_of
from bough.runtime.log_lines import say_error
from bough.security.access import guards_of

Result = TypeVar("Result")
Config = TypeVar("Config", bound=ServiceConfig)

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
IMPORTS = "imports"  # the stage from the start of the process to the first named stage


class StoppedAtStart(Unavailable):
    """The process received a stop signal during its start."""


def run(main: Callable[[], Coroutine[None, None, None]]) -> None:
    """Run a process to its end. A BoughError is printed as one line and sets the exit status (`status_of`)."""
    configure_allocator()
    try:
        asyncio.run(main())
    except BoughError as exc:
        say_error(exc)
        raise SystemExit(status_of(exc)) from exc


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


async def unless_stopped(stop: asyncio.Event, step: Awaitable[Result]) -> Result:
    """Await a step of the start. Raises StoppedAtStart if `stop` is set before it is done."""
    working, stopping = asyncio.ensure_future(step), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise StoppedAtStart("the process received a stop signal during its start")
        return await working
    finally:
        await end(working, stopping)


async def exit_if_stopped(stop: asyncio.Event, step: Awaitable[Result]) -> Result:
    """Await a step of the start; if `stop` is set before it is done, exit at once, as this process has no callers."""
    try:
        return await unless_stopped(stop, step)
    except StoppedAtStart:
        os._exit(0)  # a normal exit would wait for the thread that loads the model


def new_worker_id(kind: str) -> str:
    """A globally unique worker id."""
    return f"{kind}-{process_name(os.getpid())}-{uuid.uuid4().hex[:8]}"


def advertised(config: ServiceConfig, port: int) -> str:
    """The address at which others reach a process; `advertised_host` finds the host."""
    return joined(advertised_host(config), config.advertise_port or port)


def metrics_at(config: ServiceConfig, port: int) -> str:
    """The address of a process's metrics, with https:// for TLS; empty if `port` is negative (no metrics)."""
    scheme = "https://" if config.tls_cert else ""
    return f"{scheme}{joined(advertised_host(config), port)}" if port >= 0 else ""


def for_metrics(config: Config) -> Config:
    """Settings of the metrics server: loopback only if keys or certificates are required without --open-metrics."""
    is_local = bool(guards_of(config)) and not config.open_metrics
    return replace(config, host=LOOPBACK, advertise=LOOPBACK) if is_local else config


async def with_advertised_host(config: Config) -> Config:
    """Settings with the advertised host resolved, off the event loop. Raises ConfigError."""
    return replace(config, advertise=await asyncio.to_thread(advertised_host, config))


class Stages:
    """The consecutive stages of one start."""

    def __init__(self, age_seconds: float) -> None:
        """`age_seconds` is the time since the process was started."""
        self._seconds: dict[str, float] = {}
        self._began = time.monotonic() - age_seconds
        self._name, self._since = IMPORTS, self._began

    def enter(self, name: str) -> None:
        """Begin the next stage, named by a participle such as "reading weights"."""
        self._end()
        self._name = name
        logger.info("%s", name)

    def finish(self) -> None:
        """End the last stage and log the seconds of each."""
        self._end()
        total = self._since - self._began
        parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self._seconds.items())
        logger.info("ready after %.2f s: %s", total, parts)

    def _end(self) -> None:
        now = time.monotonic()
        self._seconds[self._name] = self._seconds.get(self._name, 0.0) + now - self._since
        self._since = now


def process_age_seconds() -> float:
    """Seconds since this process was started; 0 if unknown."""
    try:
        began = start_ticks() / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)


_stages: Stages | None = None


def stage(name: str) -> None:
    """Begin the next stage of this process's start."""
    global _stages
    if _stages is None:
        _stages = Stages(process_age_seconds())
    _stages.enter(name)


def ready() -> None:
    """End this process's start."""
    if _stages is not None:
        _stages.finish()
