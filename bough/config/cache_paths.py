"""Where the demonstration model is kept, and whether it is there. `bough.model.write_demonstration` writes it."""

from __future__ import annotations

import json
import os
from pathlib import Path

EXPANSION_NAME = "bough_expansion.json"  # beside a block-expanded checkpoint: which of its layers change anything
DEMONSTRATION_COPIES = 9  # of each of the 30 blocks: 300 layers, 2.1 GB
SUBSTITUTE_DROPS = (
    "3,14"  # layers that a substitute does best without, as tried in docs/decisions/011-substitute-drafts.md
)


def cache_folder() -> Path:
    """Where generated models are kept: BOUGH_CACHE_DIR, or the user's cache folder."""
    named = os.environ.get("BOUGH_CACHE_DIR")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bough"


def demonstration_folder(copies: int = DEMONSTRATION_COPIES) -> Path:
    """The model with this many identity copies of every block; 0 is the model as it is."""
    return cache_folder() / (f"smollm2-135m-x{copies + 1}" if copies else "smollm2-135m")


def is_written(folder: Path, copies: int) -> bool:
    """Whether a whole demonstration model is there; its manifest is written last and its folder renamed after that."""
    manifest = folder / EXPANSION_NAME
    return manifest.is_file() and json.loads(manifest.read_text()).get("copies") == copies
