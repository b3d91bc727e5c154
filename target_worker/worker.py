"""A target, put together: checkpoint, ring, streamed model, slots, engine."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from contextlib import ExitStack

import numba
import torch

from bough import __version__
from bough.config import TargetConfig
from bough.errors import ConfigError
from bough.messages import Context, VerifyCall, VerifyResult, WorkerInfo
from bough.model.checkpoint import Checkpoint
from bough.model.kv import KVSlot
from bough.model.loading import DTYPES, build_skeleton
from bough.model.tokenizer_files import load_tokenizer_files
from bough.sampling import SamplingParams
from bough.tree import Tree
from target_worker.engine import Engine
from target_worker.slots import SlotPool
from target_worker.stream import Ring
from target_worker.sweep import StreamedModel
from target_worker.weights import plan_layer

logger = logging.getLogger(__name__)

MIN_SLABS = 2  # one that is computed on, one that is filled


class TargetWorker:
    """Owns everything that the target needs; closed once."""

    def __init__(self, config: TargetConfig, worker_id: str) -> None:
        torch.set_num_threads(config.threads)
        numba.set_num_threads(min(config.threads, numba.get_num_threads()))
        self._config = config
        self._worker_id = worker_id
        checkpoint = Checkpoint.open(config.model)
        self.tokenizer = load_tokenizer_files(checkpoint.folder)
        self._fingerprint = checkpoint.fingerprint()
        self._name = config.model_name or checkpoint.folder.name
        self._device = torch.device("cpu")
        self._skeleton = build_skeleton(checkpoint, DTYPES[config.dtype])
        self.vocab_size = self._skeleton.vocab_size
        self.max_nodes = config.max_nodes
        self._max_context = min(config.max_context, self._skeleton.max_positions)
        pool = self._make_pool()
        self._resources = ExitStack()
        self._ring = self._resources.enter_context(self._make_ring())
        model = StreamedModel(self._skeleton, self._ring, config.rows, self._device)
        self._engine = Engine(model, pool, max(config.max_sweep_tokens, config.max_nodes), self._max_context)
        self._engine.start()
        self._resources.callback(self._engine.stop)
        try:
            self._warm_up()
        except BaseException:
            self.close()
            raise

    def verify(self, call: VerifyCall) -> Future[VerifyResult]:
        """Queues a call for the next sweep that has room."""
        return self._engine.verify(call)

    def release(self, session_id: str) -> Future[None]:
        """Forgets a session."""
        return self._engine.release(session_id)

    def close(self) -> None:
        """Ends the sweep thread and the link."""
        self._resources.close()

    def info(self) -> WorkerInfo:
        """Model and limits."""
        link_bytes = sum(extent.num_bytes for layer in self._ring.layers for extent in layer.extents)
        path = "past the page cache" if self._ring.is_direct else "through the page cache (O_DIRECT was refused)"
        return WorkerInfo(
            kind="target",
            worker_id=self._worker_id,
            model_name=self._name,
            model_description=self._skeleton.describe(),
            model_fingerprint=self._fingerprint,
            tokenizer_fingerprint=self.tokenizer.fingerprint,
            vocab_size=self.vocab_size,
            max_context=self._max_context,
            max_nodes=self._config.max_nodes,
            max_sessions=self._engine.pool.num_slots,
            num_sessions=len(self._engine.pool),
            link_bytes_per_pass=link_bytes,
            notes=(
                f"layers stream from disk {path} into a ring of {self._ring.num_slabs} slabs",
                f"every matrix product has {self._config.rows} rows",
            ),
            bough_version=__version__,
        )

    def _make_pool(self) -> SlotPool:
        shape, num_rows = self._skeleton.kv_shape(), self._max_context + self._config.max_nodes
        slot_bytes = num_rows * shape.row_bytes
        num_slots = self._config.kv_memory // slot_bytes
        if num_slots < 1:
            raise ConfigError(
                f"--kv-memory: {self._config.kv_memory} bytes hold no session; one of {num_rows} tokens takes "
                f"{slot_bytes}; more memory, or a smaller --max-context or --max-nodes, would do"
            )
        logger.info("%d KV slots of %d tokens, %.2f GB each", num_slots, num_rows, slot_bytes / 1e9)
        return SlotPool(
            num_slots, lambda: KVSlot(shape, num_rows, self._device), self._config.lease_seconds, time.monotonic
        )

    def _make_ring(self) -> Ring:
        layers = [plan_layer(slots) for slots in self._skeleton.layer_slots]
        slab_bytes = max(layer.num_bytes for layer in layers)
        num_slabs = min(self._config.ring_memory // slab_bytes, len(layers))
        if num_slabs < min(MIN_SLABS, len(layers)):
            raise ConfigError(
                f"--ring-memory: {self._config.ring_memory} bytes; {MIN_SLABS} layers take {MIN_SLABS * slab_bytes}"
            )
        return Ring(layers, num_slabs, self._config.link_threads)

    def _warm_up(self) -> None:
        """One sweep before anyone waits for one: every byte is read once, and the kernels are compiled."""
        context = Context.of("warm-up", [0], held=0, prompt_length=1)
        call = VerifyCall(context, epoch=0, round=0, tree=Tree.root(0), sampling=SamplingParams(temperature=0.0))
        result = self._engine.verify(call).result()
        self._engine.release("warm-up").result()
        logger.info("first sweep took %.2f s", result.timings.total_ns / 1e9)
