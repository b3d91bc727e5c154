"""Compiles all kernels that tests call; `tests.compile_kernels` has it done where it has not been."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import LlamaConfig

from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.loading.loading import DTYPES, build_skeleton
from bough.model.running.runner import ResidentModel
from draft_worker.model.model_draft import warm_up_choosing
from draft_worker.model.sources import load_draft
from loadtest.common.tiny_model import TINY, save_model
from target_worker.sweep.held_layers import compile_target
from target_worker.sweep.kernels import LAYERS
from tests.fakes.models import CPU


def compile_for(dtype: str) -> None:
    """All that a target in numbers of a type calls, and a draft."""
    for layers in LAYERS:
        if not compile_target(dtype, layers):
            raise SystemExit("the kernels do not compile; the log above says why")
    with TemporaryDirectory() as folder:
        tiny = save_model(Path(folder) / "tiny", TINY)
        warm_up(ResidentModel(build_skeleton(Checkpoint.open(tiny), DTYPES[dtype]), CPU))


def warm_up(draft: ResidentModel) -> None:
    draft.warm_up(draft.skeleton.kv_shape().empty(1, CPU))


def compile_for_drafts() -> None:
    """All that chooses a draft's nodes, and what it calls whose products are in 8 bits."""
    warm_up_choosing(1 << 15, CPU)
    with TemporaryDirectory() as folder:
        tiny = save_model(Path(folder) / "tiny", LlamaConfig(**{**TINY.to_dict(), "intermediate_size": 64}))
        warm_up(load_draft(Checkpoint.open(tiny), (), "bfloat16", CPU, bits="8"))


def compile_all() -> None:
    """Raises SystemExit if a kernel does not compile."""
    with ProcessPoolExecutor(2, get_context("fork")) as processes:  # which have what is imported above
        works = [processes.submit(compile_for, dtype) for dtype in ("bfloat16", "float32")]
        for work in [*works, processes.submit(compile_for_drafts)]:
            work.result()
