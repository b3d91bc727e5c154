"""Runs a model whose weights are all in memory on packed batches."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from bough.errors import Unavailable
from bough.model.architecture.moe import has_own_products
from bough.model.backend import backend_of
from bough.model.batch.batch import Batch, Chunk, Segment
from bough.model.batch.path_spans import Paths, tiles_of
from bough.model.kv.session_kv import KVMemory, KVSlot
from bough.model.loading.loading import Skeleton, bind_all
from bough.model.running.device import working_on
from bough.model.running.fused_parts import fuse_parts
from bough.trees.tree import Tree

logger = logging.getLogger(__name__)

ROWS = (1, 8, 16, 32, 64, 128)  # of captured steps; others are padded to the next
TAIL_WIDTH = 32  # limit of levels of a tree above the committed tokens
NUM_COLUMNS = 6  # inputs of a row without its tail and tile; at most one tile per row
NUM_WARM_UPS = 2  # runs before a capture, to keep one-time work out of it


class CaptureFailed(Unavailable):
    """A capture failed, after which torch before 2.12 believes that it continues: this process cannot use the GPU."""


class Captured(NamedTuple):
    """A captured run."""

    replay: Callable[[], None]
    result: torch.Tensor  # output tensor, overwritten by each replay


Capture = Callable[[Callable[[], torch.Tensor]], Captured]


class GraphedSteps:
    """Captured steps of a model over one memory of keys and values, for small batches.

    Launching kernels takes most of a small model's step on a GPU. A graph is launched as a whole, but has fixed
    addresses and sizes. So a step's inputs are copied together to a fixed buffer; rows and tails are padded to captured
    sizes; and all sessions' keys and values are rows of one memory.

    The host does not know how many keys are read, so attention to more than PART_KEYS is not divided as in other steps
    and has other bits. Drafts may differ, as they send the probabilities that they chose by.
    """

    def __init__(self, skeleton: Skeleton, memory: KVMemory, device: torch.device, capture: Capture) -> None:
        """Capture a step for every number of rows; writes to the memory's first row."""
        self._skeleton, self._memory, self._device = skeleton, memory, device
        self._inputs = {num: torch.zeros(_num_inputs(num), dtype=torch.int32, device=device) for num in ROWS}
        self._steps: dict[int, Captured] = {}
        for num, inputs in reversed(self._inputs.items()):  # from the largest on, to make shared memory large enough
            inputs[5 * num : NUM_COLUMNS * num] = 1  # every row is a root in row 0, whose path has one key
            inputs[NUM_COLUMNS * num : (NUM_COLUMNS + 2) * num].view(num, 2)[:, 1] = 1  # and every tile has that row
            self._steps[num] = capture(lambda num=num: self._run(num))  # type: ignore[misc]

    def has(self, batch: Batch) -> bool:
        """Whether a captured step fits a batch made with `rows=None`."""
        (chunk,) = batch.chunks
        is_narrow = all(piece.tail.shape[1] <= TAIL_WIDTH for piece in chunk.pieces)
        is_here = all(piece.slot.memory is self._memory for piece in chunk.pieces)
        return batch.num_tokens <= ROWS[-1] and is_narrow and is_here

    def logits(self, batch: Batch) -> torch.Tensor:
        """Logits (num_logit_rows, vocab_size) float32 of a batch that `has` accepts; valid until the next call."""
        num = next(num for num in ROWS if num >= batch.num_tokens)
        self._inputs[num].copy_(torch.from_numpy(_inputs(batch, num)))
        self._steps[num].replay()
        logits = self._steps[num].result
        return logits[: batch.num_tokens] if batch.all_want_logits else logits[batch.logit_rows]

    def _run(self, num_rows: int) -> torch.Tensor:
        """The captured computation."""
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
    """Rows whose paths are read from the step's input buffer."""

    steady_paths: Paths
    kv: KVMemory

    def paths_on(self, device: torch.device) -> Paths:
        return self.steady_paths

    def memory(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kv.keys[layer], self.kv.values[layer]


def _num_inputs(num_rows: int) -> int:
    return (NUM_COLUMNS + 2 + TAIL_WIDTH) * num_rows


def _inputs(batch: Batch, num_rows: int) -> np.ndarray:
    """Inputs of a step, (num_inputs,) int32.

    Padding repeats the last row, which writes the same keys and values again. It must attend like that row, so padding
    has tiles too.
    """
    (chunk,) = batch.chunks
    rows, origins, bases, lengths, tails, tiles = (numbers.numpy() for numbers in chunk.paths_on_host()[:-1])
    columns = np.stack((batch.tokens, batch.positions, rows, origins, bases, lengths))
    padding = num_rows - batch.num_tokens
    columns = np.pad(columns, ((0, 0), (0, padding)), mode="edge")
    tails = np.pad(np.pad(tails, ((0, padding), (0, 0)), mode="edge"), ((0, 0), (0, TAIL_WIDTH - tails.shape[1])))
    tiles = np.concatenate((tiles, batch.num_tokens + tiles_of([padding])))
    tiles = np.pad(tiles, ((0, num_rows - len(tiles)), (0, 0)))  # empty tiles
    return np.concatenate((columns.ravel(), tiles.ravel(), tails.ravel())).astype(np.int32, copy=False)


class GpuCapture:
    """Captures graphs on the current device; they share memory for intermediate results, so one runs at a time."""

    def __init__(self) -> None:
        self._pool: Any = None  # torch's handle of that memory
        self._stream: Any = None  # torch's own stream would be shared by all devices, while each has memory of cuBLAS

    def __call__(self, act: Callable[[], torch.Tensor]) -> Captured:
        """Run `act` a few times, then capture it."""
        self._stream = side = self._stream or torch.cuda.Stream()
        graph, own = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        side.wait_stream(own)
        with torch.cuda.stream(side):
            for _ in range(NUM_WARM_UPS):
                act()
        own.wait_stream(side)
        try:
            with torch.cuda.graph(graph, self._pool, side, capture_error_mode="thread_local"):
                result = act()
        finally:
            torch.cuda.set_stream(own)  # torch does not restore the stream if a capture fails
        self._pool = graph.pool()
        return Captured(graph.replay, result)


def graphed_steps(skeleton: Skeleton, memory: KVMemory, device: torch.device, capture: Capture) -> GraphedSteps | None:
    """Capture a model's steps; None, with a warning, if that is not possible.

    Not tried for mixtures: where experts must be made, or differ, the host waits for routers. Nor for hybrid models,
    whose recurrent layers take as many steps as paths have nodes. Raises CaptureFailed.
    """
    if skeleton.kv_shape().states is not None:
        logger.info("draft steps are launched kernel by kernel: recurrent layers take other steps with every tree")
        return None
    if any(map(has_own_products, skeleton.model.modules())):
        logger.info("draft steps are launched kernel by kernel: steps of a mixture of experts are not captured")
        return None
    try:
        with working_on(device), torch.inference_mode():
            return GraphedSteps(skeleton, memory, device, capture)
    except RuntimeError as exc:
        if torch.__version__ < "2.12":  # compares versions
            raise CaptureFailed(f"no CUDA graph could be captured on {device}: {exc}") from exc
        logger.warning("draft steps are launched kernel by kernel: no CUDA graph could be captured (%s)", exc)
        return None


class ResidentModel:
    """A draft worker's model: all layers are resident, and batches may have any number of rows.

    Runs transformers' own modules, or our compiled decoder if architecture and device allow it.
    """

    def __init__(
        self, skeleton: Skeleton, device: torch.device, is_int8: bool = False, stays_packed: bool = False
    ) -> None:
        """`is_int8` multiplies in 8 bits, which must be possible (`Backend.compiles_int8`).

        `stays_packed` keeps packed matrices, and dequantizes each just before its product.
        """
        self.skeleton = skeleton
        self.is_int8, self.stays_packed = is_int8, stays_packed
        self.device = device
        self._steps: GraphedSteps | None = None
        self._backend = backend = backend_of(device)
        self._fused = backend.decoder(skeleton, is_int8) if backend.compiles(skeleton) else None
        if self._fused is None:
            if backend.takes_any_rows:
                fuse_parts(skeleton.model.get_decoder(), backend)
            with working_on(device):
                bind_all(skeleton, device, stays_packed)

    def warm_up(self, memory: KVMemory, capture: Capture | None = None, is_captured: bool = True) -> None:
        """Run one token in the first row of a memory, which compiles kernels (seconds).

        Steps over this memory are then captured if they are to be, by default as CUDA graphs if the backend allows it.
        Raises CaptureFailed.
        """
        slot = KVSlot(self.skeleton.kv_shape(), 0, self.device)
        slot.place(memory, 0, 1)
        self.logits(Batch([Segment.tree(slot, 0, Tree.root(0))], None, self.device))
        capture = capture or (GpuCapture() if self._backend.captures_steps else None)
        if capture is not None and is_captured:
            self._steps = graphed_steps(self.skeleton, memory, self.device, capture)

    def describe(self) -> str:
        """Description of the model."""
        how = ", products in 8 bits" if self.is_int8 else ", kept packed" if self.stays_packed else ""
        return self.skeleton.describe() + how

    @property
    def is_graphed(self) -> bool:
        """Whether steps are replayed from a capture."""
        return self._steps is not None

    def logits(self, batch: Batch) -> torch.Tensor:
        """Logits (num_logit_rows, vocab_size) float32 of the rows of `batch` that want them; made with `rows=None`.

        Valid until the next call.
        """
        if self._fused is None:
            return self._torch_logits(batch)
        logits: torch.Tensor = self._fused.logits(batch)
        return logits

    @torch.inference_mode()
    def _torch_logits(self, batch: Batch) -> torch.Tensor:
        (chunk,) = batch.chunks
        with working_on(self.device):
            if self._steps is not None and self._steps.has(batch):
                return self._steps.logits(batch)
            output = self.skeleton.model(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                use_cache=False,
                logits_to_keep=batch.logit_rows,
                chunk=chunk,
            )
        logits: torch.Tensor = output.logits[0].float()
        return logits
