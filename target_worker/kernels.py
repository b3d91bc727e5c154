"""Compiles what a sweep calls on a CPU in a process of its own, which gives the compiler's memory back.

    python -m target_worker.kernels bfloat16

LLVM takes 0.3 GB beside what is compiled, and a process keeps them. A target has a budget for its memory, and may run
where there is not much more, so it leaves the compiling to another that ends before a model is opened.
"""

from __future__ import annotations

# isort: off
import bough.model  # before torch, see there
# isort: on

import fcntl
import hashlib
import logging
import subprocess
import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils.logging import disable_progress_bar

from bough.model.checkpoint import Checkpoint
from bough.model.kv_arena import KVArena
from bough.model.loading import DTYPES, build_skeleton
from bough.placement import Budgets, Fixed, place
from bough.tether import tethered
from target_worker.sweep import StreamedModel
from target_worker.tiers import Tiers
from target_worker.weights import plan_layer

logger = logging.getLogger(__name__)

SMALL = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


def compile_apart(dtype: str) -> None:
    """Unless it has been done for these files and this processor; whoever else wants it meanwhile waits.

    Where it cannot be done a target compiles as it goes, and takes the more memory.
    """
    folder = bough.model.compiled_folder()
    place = hashlib.sha256(__file__.encode()).hexdigest()[:8]  # numba tells the same files in two places apart
    done = folder / f"target-{dtype}-{place}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with done.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                subprocess.run(tethered([sys.executable, "-m", "target_worker.kernels", dtype]), check=True)
                done.touch()
    except (OSError, subprocess.CalledProcessError) as exc:
        logger.warning("kernels could not be compiled apart (%s)", exc)


def compile_here(dtype: torch.dtype) -> None:
    """All that a target in numbers of a type calls."""
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(SMALL, dtype=torch.float32).save_pretrained(folder)
        skeleton = build_skeleton(Checkpoint.open(folder), dtype)
        layers = [plan_layer(f"layer {i}", slots) for i, slots in enumerate(skeleton.layer_slots)]
        sizes, shape, device = [layer.num_bytes for layer in layers], skeleton.kv_shape(), torch.device("cpu")
        placement = place(sizes, Fixed(0, 0, 0, 0), Budgets(4 * sum(sizes), 0, 2 * max(sizes), 0))
        with Tiers(layers, placement, num_threads=1) as tiers:
            model = StreamedModel(skeleton, tiers, SMALL.max_position_embeddings, device)
            model.warm_up(KVArena(shape, shape.empty(1, device)).take(1))


if __name__ == "__main__":
    disable_progress_bar()
    compile_here(DTYPES[sys.argv[1]])
