"""Draft steps as CUDA graphs: of a small model's step on a GPU most is the launching of its kernels one by one.

A graph is launched at once, but reads and writes where it did when it was captured, and has the sizes that it had. So
the inputs of a step are copied, in one piece, to a place that stays; rows and tails are padded to sizes that were
captured; and all sessions' keys and values are rows of one memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from bough.model.batch.batch import Batch, Chunk
from bough.model.batch.gpu_paths import Paths
from bough.model.kv.session_kv import KVMemory
from bough.model.loading.loading import Skeleton
from bough.model.running.device import working_on

logger = logging.getLogger(__name__)

ROWS = (1, 8, 16, 32, 64, 128)  # of a step; others are padded to the next
TAIL_WIDTH = 32  # levels of a tree that are told apart from what is committed
NUM_COLUMNS = 6  # of a row's inputs beside its tail and a tile: at most every row is one
NUM_WARM_UPS = 2  # runs before a capture: what is made once must not be captured


class Captured(NamedTuple):
    """What was done once, to be done again."""

    replay: Callable[[], None]
    result: torch.Tensor  # what it gives, in the same place each time


Capture = Callable[[Callable[[], torch.Tensor]], Captured]


class GraphedSteps:
    """Steps of a model over one memory of keys and values, for batches that are small enough."""

    def __init__(self, skeleton: Skeleton, memory: KVMemory, device: torch.device, capture: Capture) -> None:
        """Captures a step of every number of rows; the first row of the memory is written to."""
        self._skeleton, self._memory, self._device = skeleton, memory, device
        self._inputs = {num: torch.zeros(_num_inputs(num), dtype=torch.int32, device=device) for num in ROWS}
        self._steps: dict[int, Captured] = {}
        for num, inputs in reversed(self._inputs.items()):  # what is shared is as large as the largest wants it
            inputs[5 * num : NUM_COLUMNS * num] = 1  # every row is a root in the first row: its path has one key
            inputs[NUM_COLUMNS * num : (NUM_COLUMNS + 2) * num].view(num, 2)[:, 1] = 1  # and all tiles have that row
            self._steps[num] = capture(lambda num=num: self._run(num))  # type: ignore[misc]

    def has(self, batch: Batch) -> bool:
        """Whether a batch, made with `rows=None`, is one of those that were captured."""
        (chunk,) = batch.chunks
        is_narrow = all(piece.tail.shape[1] <= TAIL_WIDTH for piece in chunk.pieces)
        is_here = all(piece.slot.memory is self._memory for piece in chunk.pieces)
        return batch.num_tokens <= ROWS[-1] and is_narrow and is_here

    def logits(self, batch: Batch) -> torch.Tensor:
        """(num_logit_rows, vocab_size) float32 of a batch that it has; valid until the next."""
        num = next(num for num in ROWS if num >= batch.num_tokens)
        self._inputs[num].copy_(torch.from_numpy(_inputs(batch, num)))
        self._steps[num].replay()
        logits = self._steps[num].result
        return logits[: batch.num_tokens] if batch.all_want_logits else logits[batch.logit_rows]

    def _run(self, num_rows: int) -> torch.Tensor:
        """What is captured, on the inputs of so many rows."""
        inputs, sizes = self._inputs[num_rows], (NUM_COLUMNS * num_rows, 2 * num_rows, TAIL_WIDTH * num_rows)
        columns, tiles, tails = torch.split(inputs, list(sizes))
        columns = columns.view(NUM_COLUMNS, num_rows)
        tokens, positions, rows, origins, bases, lengths = columns
        paths = Paths(rows.long(), origins, bases, lengths, tails.view(num_rows, TAIL_WIDTH), tiles.view(num_rows, 2))
        output = self._skeleton.model(
            input_ids=tokens.long()[None],
            position_ids=positions.long()[None],
            use_cache=False,
            chunk=_SteadyChunk(0, num_rows, (), self._device, paths, self._memory),
        )
        logits: torch.Tensor = output.logits[0].float()
        return logits


@dataclass(frozen=True)
class _SteadyChunk(Chunk):
    """Rows whose paths are wherever the inputs of the next step will say."""

    steady_paths: Paths
    kv: KVMemory

    @cached_property
    def paths(self) -> Paths:
        return self.steady_paths

    def memory(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kv.keys[layer], self.kv.values[layer]


def _num_inputs(num_rows: int) -> int:
    return (NUM_COLUMNS + 2 + TAIL_WIDTH) * num_rows


def _inputs(batch: Batch, num_rows: int) -> np.ndarray:
    """(num_inputs,) int32. Rows of padding are the last one again: they write what it writes, where it does."""
    (chunk,) = batch.chunks
    rows, origins, bases, lengths, tails, tiles = chunk.path_arrays()
    columns = np.stack((batch.tokens, batch.positions, rows, origins, bases, lengths))
    padding = num_rows - batch.num_tokens
    columns = np.pad(columns, ((0, 0), (0, padding)), mode="edge")
    tails = np.pad(np.pad(tails, ((0, padding), (0, 0)), mode="edge"), ((0, 0), (0, TAIL_WIDTH - tails.shape[1])))
    tiles = np.pad(tiles, ((0, num_rows - len(tiles)), (0, 0)))  # without rows
    return np.concatenate((columns.ravel(), tiles.ravel(), tails.ravel())).astype(np.int32, copy=False)


class GpuCapture:
    """Graphs of the current device. They share memory for what is computed on the way: one runs at a time."""

    def __init__(self) -> None:
        self._pool: Any = None  # torch's name for that memory

    def __call__(self, act: Callable[[], torch.Tensor]) -> Captured:
        """Runs it a few times before it is captured."""
        side, graph, own = torch.cuda.Stream(), torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        side.wait_stream(own)
        with torch.cuda.stream(side):
            for _ in range(NUM_WARM_UPS):
                act()
        own.wait_stream(side)
        try:
            with torch.cuda.graph(graph, self._pool, capture_error_mode="thread_local"):
                result = act()
        finally:
            torch.cuda.set_stream(own)  # a capture that fails leaves its own
        self._pool = graph.pool()
        return Captured(graph.replay, result)


def graphed_steps(skeleton: Skeleton, memory: KVMemory, device: torch.device, capture: Capture) -> GraphedSteps | None:
    """Of a model and the memory of its sessions; None, with a warning, where its steps cannot be captured."""
    try:
        with working_on(device), torch.inference_mode():
            return GraphedSteps(skeleton, memory, device, capture)
    except RuntimeError as exc:
        logger.warning("draft steps are launched kernel by kernel: no CUDA graph could be captured (%s)", exc)
        return None
