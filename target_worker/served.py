"""What every target worker does with its engine, whatever sweeps below it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack

from bough.config.processes import TargetConfig
from bough.errors import Unavailable
from bough.processes.process import for_metrics, metrics_at
from bough.processes.startup import stage
from bough.protocol.messages import VerifyCall, VerifyResult, WorkerInfo
from bough.registry.records import WorkerLoad
from bough.security.access import metrics_context
from bough.telemetry.metrics import metrics_note
from bough.tokenization.vocabulary import TokenizerFiles
from target_worker.metrics import Load, Metrics
from target_worker.scheduler.engine import SweepEngine


class ServedTarget(ABC):
    """An engine and its metrics, closed once. Subclasses make what sweeps, and say what it is."""

    tokenizer: TokenizerFiles
    vocab_size: int
    max_nodes: int  # of a tree
    _engine: SweepEngine

    def __init__(self, config: TargetConfig, worker_id: str, model_name: str) -> None:
        self._config, self._worker_id, self._name = config, worker_id, model_name
        self._metrics_told: tuple[str, ...] = ()
        self._metrics = Metrics(model_name)
        self._resources = ExitStack()

    def _start_engine(self, prepare: Callable[[], None] = lambda: None) -> None:
        """Starts the sweep thread, on which `prepare` comes first, and serves metrics; returns when it has warmed up.

        Raises:
            ConfigError: the port for metrics is in use.
            BoughError: what keeps it from a first sweep.
        """
        self._metrics.watch(self._load)
        self._engine.start(prepare)
        self._resources.callback(self._engine.stop)
        self._resources.callback(self._metrics.close)
        reached = for_metrics(self._config)
        self._metrics.serve(reached.host, reached.metrics_port, metrics_context(reached))
        self._metrics_told = metrics_note(metrics_at(reached, self._metrics.port))
        stage("warming up")
        self._engine.warm_up().result()

    def _metrics_note(self) -> tuple[str, ...]:
        """Where metrics are served; nothing where they are not."""
        return self._metrics_told

    @property
    def metrics_port(self) -> int:
        """Where /metrics is served; -1 for nowhere."""
        return self._metrics.port

    def verify(self, call: VerifyCall) -> Future[VerifyResult]:
        """Queues a call for the next sweep that has room.

        Raises:
            Unavailable: another worker is meant, which had this one's address.
        """
        if call.worker_id not in ("", self._worker_id):
            raise Unavailable(f"worker_id: {call.worker_id!r} is not here; at this address is {self._worker_id} now")
        return self._engine.verify(call)

    def release(self, session_id: str, epoch: int = 0) -> Future[None]:
        """Forgets a session, unless a newer epoch than this one has begun; 0 does not care."""
        return self._engine.release(session_id, epoch)

    def trouble(self) -> str:
        """What keeps it from answering, in words; empty where nothing does."""
        return self._engine.trouble()

    def drain(self) -> Future[None]:
        """Refuses new sessions from now on; done when no call is without an answer."""
        return self._engine.drain()

    def close(self) -> None:
        """Ends the sweep thread and what it sweeps with."""
        self._resources.close()

    def load(self) -> WorkerLoad:
        """How busy it is, for the index."""
        info = self.info()
        return WorkerLoad(info.num_sessions, info.kv_bytes, info.kv_used_bytes, self._metrics.recent_seconds())

    @abstractmethod
    def info(self) -> WorkerInfo:
        """Model, limits and load."""

    def _load(self) -> Load:
        return Load(self._engine.pool.figures(), self._engine.num_running, self._engine.num_waiting)
