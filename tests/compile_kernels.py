"""Has numba compile the kernels once, before dozens of processes would each do it at the same time."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from models import CPU, plain_logits, streamed

from bough.model.checkpoint import Checkpoint
from bough.model.loading import build_skeleton
from bough.model.runner import ResidentModel
from loadtest.tiny_model import TINY, save_model


def compile_for(dtype: torch.dtype) -> None:
    """All that a target in numbers of a type calls, and a draft."""
    with TemporaryDirectory() as folder:
        tiny = save_model(Path(folder) / "tiny", TINY)
        with streamed(tiny, dtype) as model:
            plain_logits(model, [1, 2])
        draft = ResidentModel(build_skeleton(Checkpoint.open(tiny), dtype), CPU)
        draft.warm_up(draft.skeleton.kv_shape().empty(1, CPU))


def main() -> None:
    """Takes a minute or two where nothing is in the cache, and seconds where all is."""
    with ProcessPoolExecutor(2, get_context("spawn")) as processes:
        list(processes.map(compile_for, (torch.bfloat16, torch.float32)))


if __name__ == "__main__":
    main()
