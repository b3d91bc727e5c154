"""`python -m target_worker --stage-of HEAD`: holds some of a target's layers until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Awaitable
from concurrent.futures import Future
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from functools import partial
from typing import TypeVar

from bough.concurrency.futures import settle
from bough.concurrency.tasks import end
from bough.config.processes import TargetConfig
from bough.errors import RingLost
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.checkpoint.model_places import load_tokenizer_files
from bough.model.sizes.target_limits import KVRoom
from bough.model.threads import compute_reproducibly_with, hand_over_soon
from bough.processes.process import advertised, exit_if_stopped, ready, stage, stop_event, with_advertised_host
from bough.protocol.codec_fields import like
from bough.rpc.server import serving
from bough.rpc.services import STAGES, add_service
from bough.security.access import Access, require_guarded
from target_worker.stages.frames import Frame
from target_worker.stages.joining import JoiningStage
from target_worker.stages.measured import facts_of, room_of
from target_worker.stages.ring import WINDOW_BYTES, Ring
from target_worker.stages.roster import Assignment, JoinCall, StageFigures
from target_worker.stages.service import StagesService
from target_worker.stages.slots import MirroredSlots
from target_worker.stages.stage import Stage
from target_worker.sweep.held_layers import HeldLayers, described
from target_worker.sweep.streamed_model import StageLayers

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class StageWorker:
    """The layers of one stage, and the thread that computes them."""

    def __init__(self, config: TargetConfig, ring: Ring, address: str) -> None:
        """Opens the checkpoint and builds the model without weights. Raises what a target raises."""
        hand_over_soon()
        self._config, self._ring = config, ring
        self._checkpoint = Checkpoint.open(config.model)
        self._whole = HeldLayers(config, self._checkpoint)
        tokenizer = load_tokenizer_files(self._checkpoint.path)
        self._facts = facts_of(self._whole, self._checkpoint.fingerprint(), tokenizer.fingerprint)
        self._room = room_of(self._whole, self._checkpoint, address)
        self._name, self._address = uuid.uuid4().hex, address
        self._resources = ExitStack()
        self._figures = StageFigures(device=described(self._whole.device))

    def call(self) -> JoinCall:
        """What the stage says to its head at the moment."""
        return JoinCall(self._name, self._address, self._facts, self._room, self._figures)

    def load(self, given: Assignment) -> None:
        """Load the layers and compile; blocks. Raises ConfigError or CheckpointError."""
        config = replace(
            self._whole.config,
            max_context=given.max_context,
            max_nodes=given.max_nodes,
            max_sweep_tokens=given.max_sweep_tokens,
            rows=given.product_rows,
        )
        part = StageLayers(given.first_layer, given.end_layer, len(self._whole.layers))
        held, room = HeldLayers(config, self._checkpoint, part), KVRoom(given.num_rows, given.num_states)
        held.config = config
        logger.info("stage %d: layers %d to %d of %d", given.number, part.first, part.end - 1, part.total)
        held.place(room)
        self._figures = like(StageFigures, given, memory_bytes=0, device=held.devices_in_words())
        held.compile_kernels()
        stage("reading weights")
        held.start(self._resources, room)
        shape = held.skeleton.kv_shape()
        num_bytes = sum(layer.num_bytes for layer in held.layers) + room.num_rows * shape.row_bytes
        self._figures = replace(self._figures, memory_bytes=num_bytes)
        logger.info("%s", held.memory_in_words)
        loaded = Stage(held.model, MirroredSlots(shape, held.memory), max(given.max_sweep_tokens, given.max_nodes))
        warm = Future[None]()
        thread = threading.Thread(target=self._run, args=(loaded, warm), name="stage", daemon=True)
        stage("warming up")
        thread.start()
        self._resources.callback(thread.join)
        warm.result()

    def close(self) -> None:
        """Free the layers, after the ring was closed."""
        self._resources.close()

    def _run(self, loaded: Stage, warm: Future[None]) -> None:
        try:
            compute_reproducibly_with(self._config.threads)
            loaded.warm_up()
        except Exception as exc:  # the loading thread raises it
            settle(warm, exc)
            return
        settle(warm, None)
        while (item := self._ring.next()) is not None:
            epoch, _, frame = item
            if frame is None:
                loaded.slots.forget_all()
                continue
            try:
                queue_ns = time.perf_counter_ns() - frame.arrived_ns
                self._ring.send(epoch, Frame(*loaded.run(frame.header, frame.body, queue_ns)))
            except RingLost:
                continue
            except Exception as exc:  # the thread must survive any error; the head gets it
                logger.exception("a pass failed")
                self._ring.fail(epoch, f"{type(exc).__name__}: {exc}")


async def _while_admitted(joined: asyncio.Task[None], step: Awaitable[Result]) -> Result:
    """Await a step of the stage's life. Raises what ends the stage's calls to its head."""
    working = asyncio.ensure_future(step)
    try:
        await asyncio.wait({working, joined}, return_when=asyncio.FIRST_COMPLETED)
        if joined.done():
            joined.result()
        return await working
    finally:
        working.cancel()


async def serve_stage(config: TargetConfig) -> None:
    """Run a stage: listen, join the head, load the layers that it gives, and compute until stopped.

    Raises:
        ConfigError, CheckpointError, PairingError: the stage could not start, or does not fit its head.
    """
    require_guarded(config)
    stop, access = stop_event(), Access.of(config)
    async with AsyncExitStack() as stack:
        config = await exit_if_stopped(stop, with_advertised_host(config))
        ring = Ring(access, is_head=False)
        ring.accepts = False
        serves = serving(
            config.host,
            config.port,
            STAGES.full_name,
            partial(add_service, STAGES, StagesService(ring)),
            auth_interceptors=access.auth_interceptors,
            credentials=access.worker_credentials,
            window_bytes=WINDOW_BYTES,
        )
        await stack.enter_async_context(access.watching())
        served = await stack.enter_async_context(serves)
        stage("measuring this machine")
        address = advertised(config, served.port)
        worker = await exit_if_stopped(stop, asyncio.to_thread(StageWorker, config, ring, address))
        joining = JoiningStage(access, config.stage_of, worker.call)
        joined = asyncio.create_task(joining.run())
        stack.push_async_callback(end, joined)
        stage(f"joining the head at {config.stage_of}")
        given = await exit_if_stopped(stop, _while_admitted(joined, joining.assigned))
        stack.push_async_callback(asyncio.to_thread, worker.close)
        stack.push_async_callback(ring.close)
        await exit_if_stopped(stop, _while_admitted(joined, asyncio.to_thread(worker.load, given)))
        ring.accepts = True
        await served.set_ready(True)
        ready()
        logger.info("stage %d of %s ready at %s", given.number, config.stage_of, address)
        await _while_admitted(joined, stop.wait())
        await served.leave()
