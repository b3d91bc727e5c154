"""How often a draft's guess is the target's token, what the draft takes on disk, and how fast it loads and steps.

    bough pack ~/.cache/bough/smollm2-135m --draft --drop-layers 3,14 --out DRAFT
    python -m loadtest.draft_agreement drop:3,14 DRAFT

Teacher-forced: the target (SmolLM2 as it is, bfloat16, unless --target names another) answers bough's prompts greedily,
and each draft says at every place of these answers what it would have guessed. `drop:3,14` is the target without these
layers, `drop:` the target itself; anything else is a model folder.
Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from bough.cli.up import ensure_demonstration
from bough.config.cache_paths import demonstration_folder
from bough.config.parsers import DRAFT_BITS, parse_layers
from bough.model.batch.batch import Batch, Segment
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.checkpoint.tokenizer_files import load_tokenizer_files
from bough.model.cpu.threads import compute_with
from bough.model.kv.session_kv import KVSlot
from bough.model.running.runner import ResidentModel
from bough.tokenization.tokenizer import Tokenizer
from bough.trees.tree import Tree
from draft_worker.model.sources import load_draft
from loadtest.draft_step import timed
from loadtest.prompts import load_prompts

CPU = torch.device("cpu")
DROP = "drop:"
NUM_GUESSES = 4
NUM_STEPS = 30  # that are timed


class Answer(NamedTuple):
    """What the target said."""

    tokens: list[int]  # prompt and answer
    prompt_length: int


class Row(NamedTuple):
    """One draft."""

    draft: str
    bits: str  # of its products
    own_bytes: int  # on disk; what it shares with the target is not counted
    load_seconds: float
    step_ms: float  # of one node after a short context, median
    top1: float
    top4: float
    num_tokens: int


def answer(model: ResidentModel, prompt: list[int], length: int, ends: Sequence[int]) -> Answer:
    """Greedy, one token after another."""
    slot = KVSlot(model.skeleton.kv_shape(), len(prompt) + length, CPU)
    tokens = list(prompt)
    model.logits(Batch([Segment.context(slot, 0, tokens[:-1])], None, CPU))
    while len(tokens) < len(prompt) + length and tokens[-1] not in ends:
        logits = model.logits(Batch([Segment.tree(slot, len(tokens) - 1, Tree.root(tokens[-1]))], None, CPU))
        tokens.append(int(logits[0].argmax()))
    return Answer(tokens, len(prompt))


def hits(model: ResidentModel, said: Answer) -> np.ndarray:
    """(num_answer_tokens, NUM_GUESSES) bool: [i, k] where the draft's guess of rank k is token i of the answer."""
    tokens = said.tokens
    slot = KVSlot(model.skeleton.kv_shape(), len(tokens), CPU)
    chain = Tree.of(tokens, list(range(-1, len(tokens) - 1)), [0.0] * len(tokens))
    logits = model.logits(Batch([Segment.tree(slot, 0, chain)], None, CPU))
    guesses = logits[said.prompt_length - 1 : -1].topk(NUM_GUESSES, dim=1).indices
    return (guesses == torch.tensor(tokens[said.prompt_length :])[:, None]).numpy()


def measure(name: str, bits: str, target: Path, said: Sequence[Answer]) -> Row:
    """One draft on all answers."""
    is_part = name.startswith(DROP)
    checkpoint = Checkpoint.open(target if is_part else name)
    drops = parse_layers(name.removeprefix(DROP)) if is_part else ()
    began = time.perf_counter()
    model = load_draft(checkpoint, drops, "bfloat16", CPU, bits)
    load_seconds = time.perf_counter() - began
    model.warm_up(model.skeleton.kv_shape().empty(1, CPU))
    all_hits = np.concatenate([hits(model, one) for one in said])
    own_bytes = 0 if is_part else sum(file.stat().st_size for file in checkpoint.folder.glob("*.safetensors"))
    top1, top4 = all_hits[:, 0].mean(), all_hits.any(axis=1).mean()
    return Row(name, bits, own_bytes, load_seconds, 1e3 * step_seconds(model, said[0]), top1, top4, len(all_hits))


def step_seconds(model: ResidentModel, said: Answer) -> float:
    """Of a draft step of one node, median."""
    base = said.prompt_length
    slot = KVSlot(model.skeleton.kv_shape(), base + 1, CPU)
    model.logits(Batch([Segment.context(slot, 0, said.tokens[:base])], None, CPU))
    root = Tree.root(said.tokens[base])
    batches = [Batch([Segment.tree(slot, base, root)], None, CPU) for _ in range(NUM_STEPS)]
    return statistics.median(timed(lambda batch=batch: model.logits(batch)) for batch in batches)  # type: ignore[misc]


def main() -> None:
    """Prints a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafts", nargs="+", help="model folders, or drop:LAYERS")
    parser.add_argument("--target", type=Path, help="SmolLM2 as it is by default")
    parser.add_argument("--bits", nargs="+", choices=DRAFT_BITS, default=["16"], help="of each draft's products")
    parser.add_argument("--num", type=int, default=24, help="prompts")
    parser.add_argument("--prompts", type=Path, help="JSONL file with `text` or `turns`; bough's own by default")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    if arguments.target is None:
        ensure_demonstration(0)
    target = arguments.target or demonstration_folder(0)
    compute_with(arguments.threads)
    files = load_tokenizer_files(target)
    tokenizer = Tokenizer(files)
    prompts = [tokenizer.encode_chat([("user", text)]) for text in load_prompts(arguments.prompts)[: arguments.num]]
    teacher = load_draft(Checkpoint.open(target), (), "bfloat16", CPU)
    said = [answer(teacher, prompt, arguments.max_tokens, files.eos_token_ids) for prompt in prompts]
    del teacher
    print(f"{'draft':>30} {'bits':>4} {'MB':>6} {'load s':>6} {'step ms':>7} {'top-1':>6} {'top-4':>6}")
    rows = []
    for name, bits in itertools.product(arguments.drafts, arguments.bits):
        row = measure(name, bits, target, said)
        rows.append(row)
        print(
            f"{name[-30:]:>30} {bits:>4} {row.own_bytes / 1e6:6.1f} {row.load_seconds:6.2f} {row.step_ms:7.1f} "
            f"{row.top1:6.3f} {row.top4:6.3f}",
            flush=True,
        )
    print(json.dumps({"target": target.name, "prompts": len(prompts), "rows": [_as_json(row) for row in rows]}))


def _as_json(row: Row) -> dict[str, object]:
    return {
        key: round(float(value), 4) if not isinstance(value, str) else value for key, value in row._asdict().items()
    }


if __name__ == "__main__":
    main()
