"""Assembles a draft worker: the model, its KV memory and the engine."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from bough.config.processes import DraftConfig
from bough.errors import ConfigError
from bough.grammar.allowed_tokens import Grammars
from bough.model.backend import backend_of, choose_backend
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.checkpoint.model_places import load_tokenizer_files
from bough.model.faults import named_faults
from bough.model.kernel_cache import compiled_key
from bough.model.kv.session_kv import KVArena
from bough.model.kv.state_shape import GROWN_ROWS
from bough.model.loading.loading import Skeleton
from bough.model.running.device import choose_device
from bough.model.running.runner import CaptureFailed
from bough.model.running.self_check import backend_notes, checked_backend
from bough.model.sizes.memory_budget import free_device_bytes
from bough.model.threads import compute_with, on_a_passing_thread
from bough.processes.compile_once import compile_in_subprocess
from bough.processes.process import stage
from bough.protocol.generation import WorkerInfo
from bough.runtime.exit_status import start_again
from bough.runtime.host_memory import large_pages
from bough.runtime.kv_budget import LEAST_CONTEXT, context_within, kv_budget, num_states
from bough.trees.tree_plan import MAX_EXPANSIONS
from draft_worker.candidates.candidates import TemperatureScalings
from draft_worker.engine.draft_ahead import MAX_ROWS, num_steps
from draft_worker.engine.engine import DraftEngine
from draft_worker.engine.session import Window
from draft_worker.engine.session_pool import SessionPool
from draft_worker.model.model_draft import ModelDraft, warm_up_choosing
from draft_worker.model.sources import draft_skeleton, is_int8, with_weights
from draft_worker.service import ServedDraft

WITHOUT_GRAPHS = "BOUGH_WITHOUT_GRAPHS"  # a variable of a process that was started again

logger = logging.getLogger(__name__)


def compile_draft(skeleton: Skeleton, dtype: str, bits: str, device: torch.device) -> bool:
    """Compile the kernels of draft steps, as `compile_once` does; False if the layers are not compiled whole."""
    if not backend_of(device).compiles(skeleton):
        return False
    return compile_in_subprocess("draft_worker.model.kernels", [dtype, bits], compiled_key(Path(__file__).parent))


class DraftWorker(ServedDraft):
    """Grows trees with a resident model."""

    def __init__(self, config: DraftConfig, worker_id: str) -> None:
        checkpoint = Checkpoint.open(config.model)
        super().__init__(config, worker_id, config.model_name or checkpoint.name)
        self.tokenizer = load_tokenizer_files(checkpoint.path)
        self._fingerprint = checkpoint.fingerprint()
        device = choose_device(config.device)
        choose_backend(config.backend, device)
        self._ahead_steps = num_steps(config.ahead_steps, device.type)

        def load() -> SessionPool:
            compute_with(config.threads)
            skeleton = draft_skeleton(checkpoint, config.drop_layers, config.dtype, device)
            backend = checked_backend(config.backend, [device], skeleton)
            self._metrics.name_backend(self._name, backend.name)
            bits = "8" if is_int8(skeleton, device, config.bits) else "16"
            compile_draft(skeleton, str(skeleton.dtype).removeprefix("torch."), bits, device)
            stage("reading weights")
            try:
                self._model = with_weights(skeleton, device, config.bits)
                return self._make_pool()
            except torch.OutOfMemoryError as exc:
                raise ConfigError(
                    f"--device: must have room for the draft and --kv-memory {config.kv_memory}, got {device}: {exc}; "
                    "try another device, a smaller draft, or a smaller --kv-memory"
                ) from exc

        pool = on_a_passing_thread(load)
        self.vocab_size = self._model.skeleton.vocab_size
        self.grammars = Grammars(self.tokenizer, self.vocab_size)
        draft, scalings = ModelDraft(self._model, self.grammars), TemperatureScalings(config.inverse_temperature)
        self._engine = DraftEngine(draft, self.vocab_size, config.max_children, pool, self._ahead_steps, scalings)
        self._start_thread(lambda: compute_with(config.threads))

    @property
    def max_nodes(self) -> int:
        """Limit of nodes of a tree; for sessions with states, at most the nodes for which they keep rows."""
        most = self._config.max_nodes
        return min(most, GROWN_ROWS) if self._model.skeleton.kv_shape().states else most

    def info(self) -> WorkerInfo:
        dropped, device = self._config.drop_layers, self._model.device
        positions = self._model.skeleton.max_positions
        notes = (
            *([f"substitute draft: layers {', '.join(map(str, dropped))} left out"] if dropped else []),
            *(
                [f"sees at most the last {self._max_context} tokens of a session, limited by --kv-memory"]
                if self._max_context < min(self._config.max_context or positions, positions)
                else []
            ),
            *(
                [f"draft-ahead: {self._engine.num_warm_trees} of {self._engine.num_trees} trees reused its expansions"]
                if self._ahead_steps
                else []
            ),
            *self._engine.scalings.notes(),
            *backend_notes(device),
            *self._metrics_note,
            *([] if device.type == "cpu" else [f"computes on {device}, {backend_of(device).describe(device)}"]),
        )
        return self._info(
            model_description=self._model.describe(),
            model_fingerprint=self._fingerprint,
            max_context=self._max_context,
            max_nodes=self.max_nodes,
            max_sessions=self._max_sessions,
            notes=notes,
        )

    def _divided(self) -> tuple[Window, int, int]:
        """The window of sessions, the rows that they share, and the number of sessions whose states also fit.

        Raises ConfigError if --kv-memory holds no session.
        """
        config, skeleton = self._config, self._model.skeleton
        shape, positions = skeleton.kv_shape(), skeleton.max_positions
        most = GROWN_ROWS if shape.states else MAX_EXPANSIONS
        window = Window(min(config.max_context or positions, positions), positions, most)
        least = window.max_context if config.max_context else min(LEAST_CONTEXT, positions)
        step_bytes = shape.states.step_bytes(GROWN_ROWS) if shape.states else 0
        kv_memory = config.kv_memory or kv_budget(
            window.max_rows * shape.row_bytes + shape.growing_bytes,
            free_device_bytes(self._model.device) - step_bytes,
            (least + most) * shape.row_bytes + shape.growing_bytes,
        )  # limited by the memory that the model and its steps leave free
        if not config.max_context:
            context = context_within(kv_memory, shape.row_bytes, shape.growing_bytes, most, window.max_context)
            window = window._replace(max_context=context)
        longest = window.max_rows * shape.row_bytes
        num_slots = num_states(kv_memory, longest, shape.growing_bytes)
        num_rows = (kv_memory - num_slots * shape.growing_bytes) // shape.row_bytes
        if num_rows <= most:
            least = (most + 1) * shape.row_bytes + shape.growing_bytes
            raise ConfigError(f"--kv-memory: must be at least {least} bytes, for one session, got {kv_memory}")
        return window._replace(max_context=min(window.max_context, num_rows - most)), num_rows, num_slots

    def _make_pool(self) -> SessionPool:
        """Allocate memory for sessions, and warm the model up."""
        skeleton = self._model.skeleton
        shape = skeleton.kv_shape()
        window, num_rows, num_slots = self._divided()
        self._max_context, self._max_sessions = window.max_context, num_rows // window.max_rows
        device, num_bytes = self._model.device, num_rows * shape.row_bytes
        is_cpu = device.type == "cpu"  # for attention that looks up a page for every few keys
        memory = shape.within(large_pages(num_bytes), num_rows) if is_cpu else shape.empty(num_rows, device)
        stage("warming up")
        with named_faults(device):
            try:
                self._model.warm_up(memory, is_captured=WITHOUT_GRAPHS not in os.environ)
            except CaptureFailed as exc:
                logger.warning("starting again without CUDA graphs: %s", exc)
                start_again(WITHOUT_GRAPHS)
            warm_up_choosing(skeleton.vocab_size, device)
        arena = KVArena(shape, memory, rows_to_keep=lambda slot: slot.num_rows, most_slots=num_slots)
        return SessionPool(arena, window, self._ahead_steps * MAX_ROWS, shape.growing_bytes)
