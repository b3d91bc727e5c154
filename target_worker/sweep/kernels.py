"""Compiles the kernels of CPU sweeps, in a separate process (see `bough.processes.compile_once`).

python -m target_worker.sweep.kernels bfloat16 whole
"""

from __future__ import annotations

# isort: off
import bough.model  # noqa: F401  # before torch, see there
# isort: on

import gc
import sys
import tempfile
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.kv.session_kv import KVArena
from bough.model.loading.loading import DTYPES, build_skeleton
from bough.model.small_model import ATTENTION, HYBRID, SIZES, WHOLE, write_small
from bough.sizing.placement import Budgets, Fixed, place
from target_worker.link.layer_extents import plan_layer
from target_worker.sweep.streamed_model import StreamedModel
from target_worker.sweep.tiers import Tiers

# Compile whole layers, only their attention and products, or these and the recurrence.
LAYERS = {"whole": WHOLE, "attention": ATTENTION, "recurrent": HYBRID}


def compile_here(dtype: torch.dtype, layers: str) -> None:
    """Compile the kernels for a dtype and LAYERS, except those that only experts and packed weights need."""
    with tempfile.TemporaryDirectory() as name:
        _warm_up(write_small(LAYERS[layers], Path(name) / "small"), dtype)


def _warm_up(folder: Path, dtype: torch.dtype) -> None:
    skeleton = build_skeleton(Checkpoint.open(folder), dtype)
    layers = [plan_layer(f"layer {i}", slots) for i, slots in enumerate(skeleton.layer_slots)]
    sizes, shape, device = [layer.num_bytes for layer in layers], skeleton.kv_shape(), torch.device("cpu")
    placement = place(sizes, Fixed(0, 0, 0, 0), Budgets(4 * sum(sizes), 0, 2 * max(sizes), 0))
    with Tiers(layers, placement, num_threads=1) as tiers:
        model = StreamedModel(skeleton, tiers, SIZES["max_position_embeddings"], device)
        model.warm_up(KVArena(shape, shape.empty(1, device)).take(1), 1)


if __name__ == "__main__":
    gc.freeze()  # imported modules stay until the end: collecting garbage among them takes a tenth of the time
    disable_progress_bar()
    compile_here(DTYPES[sys.argv[1]], sys.argv[2])
