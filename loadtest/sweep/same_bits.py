"""Checks that a target on the CPU computes the same bits as at another commit, on this machine.

    python -m loadtest.sweep.same_bits --commit COMMIT [--cases llama bfloat16,mixtral float32]

Small random models of several families and types, some of them packed, run whole sweeps: two sessions' trees, then
what follows a committed path. All logits of that commit are compared with those of this one, as bits depend on the
processor. Takes minutes to compile that commit's kernels. Ends with one JSON line; exit status 1 if any logits differ.
"""

from __future__ import annotations

# isort: off
import bough.model  # noqa: F401  # before torch, see there
# isort: on

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Gemma2Config, LlamaConfig, MixtralConfig, Olmo2Config, PretrainedConfig

from bough.config.flag_parser import FlagParser
from bough.model.small_model import write_small
from loadtest.common.machine import processor
from loadtest.common.packed_model import pack

HERE = Path(__file__).parents[2]
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MODELS: dict[str, tuple[PretrainedConfig, int]] = {  # with the bits of its layers in compressed-tensors; 0 is unpacked
    "llama": (LlamaConfig(**SIZES), 0),
    "llama-4": (LlamaConfig(**SIZES), 4),
    "llama-8": (LlamaConfig(**SIZES), 8),
    "olmo2": (Olmo2Config(**SIZES), 0),
    "gemma2": (Gemma2Config(**SIZES, sliding_window=24, query_pre_attn_scalar=64), 0),
    "mixtral": (MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2), 0),
}
CASES = tuple(f"{model} {dtype}" for model in MODELS for dtype in ("bfloat16", "float32"))


def compared(commit: str, cases: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """Number of differing logits between the two trees of files, and the largest difference, by case."""
    trees = {"then": exported(commit, folder / "tree"), "now": HERE}
    rows = []
    for case in cases:
        name, dtype = case.split()
        model = folder / name
        if not model.exists():
            written(name, model)
        then, now = (logits(tree, model, dtype, folder / f"{name}-{dtype}-{when}.npy") for when, tree in trees.items())
        different, most = int((then != now).sum()), float(np.abs(then - now).max())
        rows.append({"case": case, "logits": then.size, "different": different, "largest_difference": most})
        print(rows[-1], flush=True)
    return rows


def exported(commit: str, folder: Path) -> Path:
    """Export the repository's files at a commit."""
    archive = subprocess.run(["git", "archive", commit], cwd=HERE, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    return folder


def written(name: str, folder: Path) -> None:
    """Write one of MODELS."""
    torch.manual_seed(0)
    config, bits = MODELS[name]
    if not bits:
        write_small(config, folder)
        return
    write_small(config, folder.with_suffix(".plain"))
    pack(folder.with_suffix(".plain"), bits, folder)


def logits(tree: Path, model: Path, dtype: str, out: Path) -> np.ndarray:
    """Compute a model's logits with a tree of files."""
    script = Path(__file__).with_name("sweep_logits.py")
    command = [sys.executable, "-P", str(script), str(model), dtype, str(out)]
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")
    }  # without this tree's cache settings
    subprocess.run(command, cwd=tree, env={**environ, "PYTHONPATH": str(tree)}, check=True)
    found: np.ndarray = np.load(out)
    return found


def main() -> None:
    """Print a line for each case, and one JSON line."""
    parser = FlagParser(description=__doc__)
    parser.add_argument("--commit", required=True, help="commit of this repository")
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)} (default: all)")
    arguments = parser.parse_args()
    cases = arguments.cases.split(",")
    if unknown := [case for case in cases if case not in CASES]:
        parser.error(f"--cases must be of {', '.join(CASES)}, got {', '.join(unknown)}")
    with tempfile.TemporaryDirectory() as name:
        rows = compared(arguments.commit, cases, Path(name))
    is_same = not any(row["different"] for row in rows)
    print(json.dumps({"commit": arguments.commit, "processor": processor(), "same": is_same, "cases": rows}))
    raise SystemExit(0 if is_same else 1)


if __name__ == "__main__":
    main()
