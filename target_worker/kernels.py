"""Compiles what a sweep calls on a CPU in a process of its own, which gives the compiler's memory back.

    python -m target_worker.kernels bfloat16

LLVM takes 0.3 GB beside what is compiled, and a process keeps them. A target has a budget for its memory, and may run
where there is not much more, so it leaves the compiling to another that ends before a model is opened.
"""

from __future__ import annotations

# isort: off
import bough.model  # noqa: F401  # before torch, see there
# isort: on

import fcntl
import hashlib
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numba
import torch
from llvmlite.binding import get_host_cpu_name
from transformers import AutoModelForCausalLM, LlamaConfig, Olmo2Config
from transformers.utils.logging import disable_progress_bar

from bough.model.checkpoint import Checkpoint
from bough.model.kv_arena import KVArena
from bough.model.loading import DTYPES, build_skeleton
from bough.model.pack import pack
from bough.placement import Budgets, Fixed, place
from bough.tether import MODULE, run
from target_worker.sweep import StreamedModel
from target_worker.tiers import Tiers
from target_worker.weights import plan_layer

logger = logging.getLogger(__name__)

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,  # of which defaults would be no tokens of so few
    "eos_token_id": None,
    "pad_token_id": None,
}
SMALL = LlamaConfig(**SIZES), Olmo2Config(**SIZES)  # layers that are compiled whole, and attention alone
PACKED_BITS = (4, 8)
TIMEOUT_SECONDS = 900.0


def compile_apart(dtype: str) -> bool:
    """Unless it has been done for these files and this processor; whoever else wants it meanwhile waits.

    Where it cannot be done, which is logged and False, a target compiles as it goes, and takes the more memory.
    """
    folder = Path(os.environ["NUMBA_CACHE_DIR"])
    done = folder / f"target-{dtype}-{_ground()}"
    if done.exists():
        return True
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with done.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                logger.info("compiling kernels for %s in a process of its own", dtype)
                _compile_in_a_process(dtype)
                done.touch()
    except (OSError, subprocess.SubprocessError) as exc:
        logger.warning("kernels could not be compiled apart (%s)", exc)
        return False
    return True


def _compile_in_a_process(dtype: str) -> None:
    """Raises subprocess.SubprocessError where it fails or takes too long."""
    command = [sys.executable, *MODULE, "target_worker.kernels", dtype]
    status = run(
        command, lambda line: subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=sys.stderr), TIMEOUT_SECONDS
    )
    if status != 0:
        raise subprocess.CalledProcessError(status, command)


def compile_here(dtype: torch.dtype) -> None:
    """What targets in numbers of a type call, but for what only mixtures of experts do."""
    for config in SMALL:
        with tempfile.TemporaryDirectory() as name:
            whole = Path(name) / "whole"
            AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(whole)
            _warm_up(whole, dtype)
            for bits in PACKED_BITS if config is SMALL[0] else ():
                pack(str(whole), bits, whole.with_name(f"packed{bits}"))
                _warm_up(whole.with_name(f"packed{bits}"), dtype)


def _warm_up(folder: Path, dtype: torch.dtype) -> None:
    skeleton = build_skeleton(Checkpoint.open(folder), dtype)
    layers = [plan_layer(f"layer {i}", slots) for i, slots in enumerate(skeleton.layer_slots)]
    sizes, shape, device = [layer.num_bytes for layer in layers], skeleton.kv_shape(), torch.device("cpu")
    placement = place(sizes, Fixed(0, 0, 0, 0), Budgets(4 * sum(sizes), 0, 2 * max(sizes), 0))
    with Tiers(layers, placement, num_threads=1) as tiers:
        model = StreamedModel(skeleton, tiers, SIZES["max_position_embeddings"], device)
        model.warm_up(KVArena(shape, shape.empty(1, device)).take(1))


def _ground() -> str:
    """What numba tells what it has compiled apart by: its own version, the processor and the files."""
    hash_ = hashlib.sha256(f"{numba.__version__} {get_host_cpu_name()}".encode())
    for file in sorted(Path(__file__).parent.glob("*.py")):
        hash_.update(file.read_bytes())
    return hash_.hexdigest()[:12]


if __name__ == "__main__":
    disable_progress_bar()
    compile_here(DTYPES[sys.argv[1]])
