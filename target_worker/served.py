"""What all target workers share, real or simulated."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

from bough.config.processes import TargetConfig
from bough.errors import Unavailable
from bough.processes.startup import stage
from bough.processes.worker_process import ServedWorker
from bough.protocol.messages import VerifyCall, VerifyResult
from bough.protocol.worker_info import WorkerInfo
from bough.registry.records import WorkerLoad
from target_worker.metrics import Metrics, TargetLoad
from target_worker.scheduler.engine import SweepEngine


class ServedTarget(ServedWorker[TargetConfig]):
    """An engine and its metrics, closed once. Subclasses supply the sweeper and `info`."""

    kind = "target"
    max_nodes: int  # nodes of a tree
    _engine: SweepEngine
    _metrics: Metrics

    def __init__(self, config: TargetConfig, worker_id: str, name: str) -> None:
        super().__init__(config, worker_id, name, Metrics(name))
        self._resources = ExitStack()

    def _start_engine(self, prepare: Callable[[], None] = lambda: None) -> None:
        """Start the sweep thread, which first calls `prepare`, and serve metrics; returns when it has warmed up.

        Raises ConfigError if the port for metrics is in use, or what the first sweep raised.
        """
        self._metrics.watch(self._load)
        self._engine.start(prepare)
        self._resources.callback(self._engine.stop)
        self._resources.callback(self._metrics.close)
        self._serve_metrics()
        stage("warming up")
        self._engine.warm_up().result()

    def verify(self, call: VerifyCall) -> Future[VerifyResult]:
        """Queue a call for the next sweep with room. Raises Unavailable for one of another worker at this address."""
        if call.worker_id not in ("", self._worker_id):
            raise Unavailable(f"worker_id: must be {self._worker_id} at this address, got {call.worker_id!r}")
        return self._engine.verify(call)

    def release(self, session_id: str, epoch: int = 0) -> Future[None]:
        return self._engine.release(session_id, epoch)

    def trouble(self) -> str:
        return self._engine.trouble()

    def drain(self) -> Future[None]:
        return self._engine.drain()

    def close(self) -> None:
        self._resources.close()

    def load(self) -> WorkerLoad:
        figures = self._engine.pool.figures()
        return WorkerLoad(figures.num_bytes, figures.held_bytes)

    def _info(self, **own: Any) -> WorkerInfo:
        engine, figures = self._engine, self._engine.pool.figures()
        return super()._info(
            max_nodes=self.max_nodes,
            num_sessions=figures.num_sessions,
            kv_bytes=figures.num_bytes,
            kv_used_bytes=figures.held_bytes,
            num_waiting=engine.num_waiting,
            num_running=engine.num_running,
            num_passes=engine.num_passes,
            cost=engine.cost,
            **own,
        )

    def _load(self) -> TargetLoad:
        return TargetLoad(self._engine.pool.figures(), self._engine.num_running, self._engine.num_waiting)
