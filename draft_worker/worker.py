"""A loaded draft model, its sessions, and the one thread that runs it."""

from __future__ import annotations

import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from bough import __version__
from bough.config import DraftConfig
from bough.errors import ConfigError, InvalidRequest, NotFound
from bough.messages import GrowCall, GrowResult, Timings, WorkerInfo
from bough.model.checkpoint import Checkpoint
from bough.model.device import choose_device
from bough.model.kv import KVSlot
from bough.model.threads import compute_with
from bough.model.tokenizer_files import load_tokenizer_files
from draft_worker.session import DraftSession
from draft_worker.sources import load_draft, open_adapter

MAX_EXPANSIONS = 2048  # nodes expanded for one tree: each takes a row of the session's slot


class DraftWorker:
    """Grows trees, one call at a time. The session used longest ago gives way: losing its KV costs time only."""

    def __init__(self, config: DraftConfig, worker_id: str) -> None:
        compute_with(config.threads)
        self._config = config
        self._worker_id = worker_id
        checkpoint = Checkpoint.open(config.model)
        self.tokenizer = load_tokenizer_files(checkpoint.folder)
        self._fingerprint = checkpoint.fingerprint()
        self._name = config.model_name or checkpoint.folder.name
        adapter = open_adapter(config)
        self._dropped = adapter.manifest.dropped_layers if adapter else config.drop_layers
        device = choose_device(config.device)
        self._model = load_draft(checkpoint, config.drop_layers, adapter, config.dtype, device)
        skeleton = self._model.skeleton
        self.vocab_size = skeleton.vocab_size
        self._max_context = min(config.max_context, skeleton.max_positions)
        self._num_rows = self._max_context + MAX_EXPANSIONS
        self._shape = skeleton.kv_shape()
        session_bytes = self._num_rows * self._shape.row_bytes
        self._max_sessions = config.kv_memory // session_bytes
        if self._max_sessions < 1:
            raise ConfigError(f"--kv-memory: {config.kv_memory} bytes hold no session; one takes {session_bytes}")
        self._sessions: OrderedDict[str, DraftSession] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "draft", compute_with, (config.threads,))

    def grow(self, call: GrowCall) -> Future[GrowResult]:
        """Queues a call; the future raises InvalidRequest or PrefixMissing."""
        return self._thread.submit(self._grow, call, time.perf_counter_ns())

    def release(self, session_id: str) -> Future[None]:
        """Forgets a session; the future raises NotFound."""
        return self._thread.submit(self._release, session_id)

    def close(self) -> None:
        """Ends the thread after the tree that is being grown."""
        self._thread.shutdown(cancel_futures=True)

    def info(self) -> WorkerInfo:
        """Model and limits."""
        dropped, device = self._dropped, self._model.device
        notes = (
            *([f"substitute draft: layers {', '.join(map(str, dropped))} left out"] if dropped else []),
            *([f"weights corrected by {self._config.adapter}"] if self._config.adapter else []),
            *([] if device.type == "cpu" else [f"computes on {device}, {torch.cuda.get_device_name(device)}"]),
        )
        return WorkerInfo(
            kind="draft",
            worker_id=self._worker_id,
            model_name=self._name,
            model_description=self._model.skeleton.describe(),
            model_fingerprint=self._fingerprint,
            tokenizer_fingerprint=self.tokenizer.fingerprint,
            vocab_size=self.vocab_size,
            max_context=self._max_context,
            max_nodes=self._config.max_nodes,
            max_sessions=self._max_sessions,
            num_sessions=len(self._sessions),
            notes=notes,
            bough_version=__version__,
        )

    @property
    def max_nodes(self) -> int:
        """Most nodes of a tree."""
        return self._config.max_nodes

    def _grow(self, call: GrowCall, arrived_ns: int) -> GrowResult:
        began_ns = time.perf_counter_ns()
        growth, needed = call.plan.growth, call.context.base_length + 1
        if growth.max_expansions > MAX_EXPANSIONS:
            raise InvalidRequest(
                f"growth: {growth} may expand {growth.max_expansions} nodes; {MAX_EXPANSIONS} would do"
            )
        if needed > self._max_context:
            raise InvalidRequest(f"context: {needed} tokens; at most {self._max_context} fit a session of this draft")
        session = self._session(call.context.session_id)
        tree, num_steps = session.grow(call, self._model, self._config.branch)
        ended_ns = time.perf_counter_ns()
        timings = Timings(
            total_ns=ended_ns - arrived_ns,
            queue_ns=began_ns - arrived_ns,
            compute_ns=ended_ns - began_ns,
            num_passes=num_steps,
        )
        return GrowResult(tree, session.slot.length, timings)

    def _session(self, session_id: str) -> DraftSession:
        if session_id not in self._sessions:
            if len(self._sessions) == self._max_sessions:
                self._sessions.popitem(last=False)
            self._sessions[session_id] = DraftSession(KVSlot(self._shape, self._num_rows, self._model.device))
        self._sessions.move_to_end(session_id)
        return self._sessions[session_id]

    def _release(self, session_id: str) -> None:
        if self._sessions.pop(session_id, None) is None:
            raise NotFound(f"session_id: {session_id!r} is not held here")
