"""Cache paths of the demonstration model, which `bough.model.write_demonstration` writes."""

from __future__ import annotations

import json
import os
from pathlib import Path

EXPANSION_NAME = "bough_expansion.json"  # manifest of a block-expanded checkpoint: which layers are not identities
DEMONSTRATION_COPIES = 9  # of each of the 30 blocks: 300 layers, 2.1 GB
SUBSTITUTE_DROPS = "3,14"  # best layers to leave out of a substitute (docs/decisions/011-substitute-drafts.md)


def cache_folder() -> Path:
    """The folder of generated models: BOUGH_CACHE_DIR, or bough in the user's cache folder."""
    named = os.environ.get("BOUGH_CACHE_DIR")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bough"


def demonstration_folder(copies: int = DEMONSTRATION_COPIES) -> Path:
    """The folder of the model with `copies` identity copies of each block; 0 is the original model."""
    return cache_folder() / (f"smollm2-135m-x{copies + 1}" if copies else "smollm2-135m")


def is_written(folder: Path, copies: int) -> bool:
    """Whether the demonstration model is complete; its manifest is written last."""
    try:
        return bool(json.loads((folder / EXPANSION_NAME).read_text())["copies"] == copies)
    except (OSError, ValueError, LookupError, TypeError):  # not there, or cut off as the machine went down
        return False
