"""Imports torch and transformers as workers do, for tests that need them."""

from __future__ import annotations

import os
from functools import cache

from bough.model.architecture.light_imports import import_transformers


@cache
def import_torch() -> None:
    """Import both without torch's compiler. Without a GPU Triton interprets, which it reads when it is imported."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    import_transformers()
