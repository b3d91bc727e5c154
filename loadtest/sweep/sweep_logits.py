"""Writes the logits of a few sweeps on the CPU, computed by the tree of files that is first in PYTHONPATH.

`loadtest.sweep.same_bits` runs this file with another commit's tree and with this one's, so it also tries the names
that its imports had there.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

NUM_ROWS, NODES = 300, 40
PROMPTS = (90, 7)  # tokens: several of attention's blocks, and less than one


def found(attribute: str, *modules: str) -> Any:
    """An attribute of the first of these modules that exists."""
    for name in modules:
        try:
            return getattr(import_module(name), attribute)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"{attribute} is in none of {', '.join(modules)}")


def logits(folder: Path, dtype_name: str) -> np.ndarray:
    """Logits (num_rows, vocab_size) float32 of two sessions' trees in one sweep, and of roots after a commit."""
    streamed = found("streamed", "tests.fakes.models", "tests.models")
    batch_of = found("Batch", "bough.model.batch.batch", "bough.model.batch")
    segment = found("Segment", "bough.model.batch.batch", "bough.model.batch")
    slot_of = found("KVSlot", "bough.model.kv.session_kv", "bough.model.kv")
    tree_of = found("Tree", "bough.trees.tree", "bough.tree")
    import torch

    rng, cpu, rows = np.random.default_rng(0), torch.device("cpu"), []
    with streamed(folder, getattr(torch, dtype_name)) as model:
        slots = [slot_of(model.skeleton.kv_shape(), NUM_ROWS, cpu) for _ in PROMPTS]
        prompts = [rng.integers(0, 60, size).tolist() for size in PROMPTS]
        parents = [-1] + [int(rng.integers(max(0, node - 6), node)) for node in range(1, NODES)]
        tree = tree_of.of(list(range(NODES)), parents, [0.0] * NODES)
        segments = [segment.context(slot, 0, prompt) for slot, prompt in zip(slots, prompts, strict=True)]
        segments += [segment.tree(slot, size, tree) for slot, size in zip(slots, PROMPTS, strict=True)]
        rows.append(model.sweep(batch_of(segments, model.rows, cpu))[0].float().numpy().copy())
        path = tree.path(NODES - 1)
        for slot, prompt in zip(slots, prompts, strict=True):
            slot.compact(range(len(prompt)), prompt)
            slot.compact([len(prompt) + node for node in path], [int(tree.tokens[node]) for node in path])
        roots = [segment.tree(slot, slot.length, tree_of.root(11)) for slot in slots]
        rows.append(model.sweep(batch_of(roots, model.rows, cpu))[0].float().numpy().copy())
    return np.concatenate(rows)


if __name__ == "__main__":
    import_module("bough.model")  # before torch, see there
    with suppress(ImportError):  # there are trees without it
        found("import_transformers", "bough.model.architecture.light_imports")()
    np.save(sys.argv[3], logits(Path(sys.argv[1]), sys.argv[2]))
