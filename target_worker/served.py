"""What all target workers share, real or simulated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack

from bough.config.processes import TargetConfig
from bough.errors import Unavailable
from bough.grammar.allowed_tokens import Grammars
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
    """An engine and its metrics, closed once. Subclasses supply the sweeper and `info`."""

    tokenizer: TokenizerFiles
    vocab_size: int
    max_nodes: int  # nodes of a tree
    grammars: Grammars
    _engine: SweepEngine

    def __init__(self, config: TargetConfig, worker_id: str, model_name: str) -> None:
        self._config, self._worker_id, self._name = config, worker_id, model_name
        self._metrics_note: tuple[str, ...] = ()  # where metrics are served; empty if they are not
        self._metrics = Metrics(model_name)
        self._resources = ExitStack()

    def _start_engine(self, prepare: Callable[[], None] = lambda: None) -> None:
        """Start the sweep thread, which first calls `prepare`, and serve metrics; returns when it has warmed up.

        Raises:
            ConfigError: the port for metrics is in use.
            BoughError: the first sweep failed.
        """
        self._metrics.watch(self._load)
        self._engine.start(prepare)
        self._resources.callback(self._engine.stop)
        self._resources.callback(self._metrics.close)
        reached = for_metrics(self._config)
        self._metrics.serve(reached.host, reached.metrics_port, metrics_context(reached))
        self._metrics_note = metrics_note(metrics_at(reached, self._metrics.port))
        stage("warming up")
        self._engine.warm_up().result()

    @property
    def metrics_port(self) -> int:
        """Port of /metrics; -1 if not served."""
        return self._metrics.port

    def compile_grammar(self, call: VerifyCall) -> None:
        """Compile the grammar of a call, so that no sweep waits for it; may take a second, on any thread.

        Raises:
            InvalidRequest: it cannot be followed.
        """
        self.grammars.compiled(call.sampling.grammar, call.context.cache_salt)

    def verify(self, call: VerifyCall) -> Future[VerifyResult]:
        """Queue a call for the next sweep with room.

        Raises:
            Unavailable: the call is for another worker, which had this one's address.
        """
        if call.worker_id not in ("", self._worker_id):
            raise Unavailable(f"worker_id: must be {self._worker_id} at this address, got {call.worker_id!r}")
        return self._engine.verify(call)

    def release(self, session_id: str, epoch: int = 0) -> Future[None]:
        """Forget a session unless it has a newer epoch; epoch 0 always forgets."""
        return self._engine.release(session_id, epoch)

    def trouble(self) -> str:
        """Why the worker cannot answer; empty if it can."""
        return self._engine.trouble()

    def drain(self) -> Future[None]:
        """Refuse new sessions from now on; done when all calls are answered."""
        return self._engine.drain()

    def close(self) -> None:
        """End the sweep thread and close its resources."""
        self._resources.close()

    def load(self) -> WorkerLoad:
        """Load of the worker, for the index."""
        info = self.info()
        return WorkerLoad(info.num_sessions, info.kv_bytes, info.kv_used_bytes, self._metrics.recent_seconds())

    @abstractmethod
    def info(self) -> WorkerInfo:
        """Model, limits and load."""

    def _load(self) -> Load:
        return Load(self._engine.pool.figures(), self._engine.num_running, self._engine.num_waiting)
