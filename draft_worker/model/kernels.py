"""Compiles the kernels of CPU draft steps, in a separate process (see `bough.processes.compile_once`).

python -m draft_worker.model.kernels bfloat16 8
"""

from __future__ import annotations

# isort: off
import bough.model  # noqa: F401  # before torch, see there
# isort: on

import gc
import os
import sys
import tempfile
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.small_model import SIZES, WHOLE, write_small
from draft_worker.model.model_draft import warm_up_choosing
from draft_worker.model.sources import load_draft

CPU = torch.device("cpu")
NICENESS = 10  # lower priority: answers need the target's kernels and sweeps, but not a draft


def compile_here(dtype: str, bits: str) -> None:
    """Compile the kernels of drafts of a dtype whose layers are compiled whole, and those that choose nodes."""
    with tempfile.TemporaryDirectory() as name:
        draft = load_draft(Checkpoint.open(write_small(WHOLE, Path(name) / "whole")), (), dtype, CPU, bits)
    draft.warm_up(draft.skeleton.kv_shape().empty(1, CPU))
    warm_up_choosing(SIZES["vocab_size"], CPU)


if __name__ == "__main__":
    os.nice(NICENESS)
    gc.freeze()  # imported modules stay until the end: collecting garbage among them takes a tenth of the time
    disable_progress_bar()
    compile_here(sys.argv[1], sys.argv[2])
