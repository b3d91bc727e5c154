"""Runs a model whose weights are all in memory on packed batches."""

from __future__ import annotations

import torch

from bough.model.backend import backend_of
from bough.model.batch.batch import Batch, Segment
from bough.model.kv.session_kv import KVMemory, KVSlot
from bough.model.loading.late_writes import bind_all
from bough.model.loading.loading import Skeleton
from bough.model.running.cuda_graphs import Capture, GpuCapture, GraphedSteps, graphed_steps
from bough.model.running.device import working_on
from bough.trees.tree import Tree


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
            with working_on(device):
                bind_all(skeleton, device, stays_packed)

    def warm_up(self, memory: KVMemory, capture: Capture | None = None) -> None:
        """Run one token in the first row of a memory, which compiles kernels (seconds).

        Steps over this memory are then captured, by default as CUDA graphs if the backend allows it.
        """
        slot = KVSlot(self.skeleton.kv_shape(), 0, self.device)
        slot.place(memory, 0, 1)
        self.logits(Batch([Segment.tree(slot, 0, Tree.root(0))], None, self.device))
        capture = capture or (GpuCapture() if self._backend.captures_steps else None)
        if capture is not None:
            self._steps = graphed_steps(self.skeleton, memory, self.device, capture)

    def describe(self) -> str:
        """Description of the model."""
        how = ", products in 8 bits" if self.is_int8 else ", written out by matrix" if self.stays_packed else ""
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
