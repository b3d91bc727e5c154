"""Measures the quality of packed weights: perplexity in 16, 8 and 4 bits, and agreement of the best token.

    python -m loadtest.sweep.perplexity [MODEL] [--text FILE]

The text is the beginning of Python's language reference as it comes with the interpreter (`pydoc_data.topics`), unless
--text names a file; it is cut into --pieces of --length tokens. Packs are written to a temporary folder. Ends with one
JSON line.
"""

from __future__ import annotations

import json
import math
import platform
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import torch

from bough.cli.machine.up import ensure_demonstration
from bough.config.cache_paths import demonstration_folder
from bough.config.flag_parser import FlagParser
from bough.model.batch.batch import Batch, Segment
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.checkpoint.tokenizer_files import load_tokenizer_files
from bough.model.kv.session_kv import KVSlot
from bough.model.loading.loading import build_skeleton
from bough.model.packing.pack import pack
from bough.model.running.runner import ResidentModel
from bough.tokenization.tokenizer import Tokenizer
from bough.trees.tree import Tree

CPU = torch.device("cpu")
MAX_TOKEN_CHARACTERS = 16  # upper bound of the average, which limits the text to read


class Reading(NamedTuple):
    """A model's predictions for some documents."""

    loss: float  # mean negative log-likelihood of a token, in nats
    best: torch.Tensor  # (num_tokens,) likeliest token at each position


def read(folder: Path, documents: list[list[int]]) -> Reading:
    """Compute a model's predictions for the documents."""
    skeleton = build_skeleton(Checkpoint.open(folder), torch.bfloat16)
    model = ResidentModel(skeleton, CPU)
    slot = KVSlot(skeleton.kv_shape(), max(map(len, documents)), CPU)
    losses, best = [], []
    for tokens in documents:
        chain = Tree.of(tokens, list(range(-1, len(tokens) - 1)), [0.0] * len(tokens))
        logits = model.logits(Batch([Segment.tree(slot, 0, chain)], None, CPU))[:-1]
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="none"))
        best.append(logits.argmax(1))
    return Reading(float(torch.cat(losses).mean()), torch.cat(best))


def main() -> None:
    """Print a table and one JSON line."""
    parser = FlagParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, help="in 16 bits; SmolLM2 as it is by default")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--pieces", type=int, default=16)
    arguments = parser.parse_args()
    if arguments.model is None:
        ensure_demonstration(0)
    model = arguments.model or demonstration_folder(0)
    tokenizer = Tokenizer(load_tokenizer_files(model))
    text = arguments.text.read_text() if arguments.text else "\n".join(topics[name] for name in sorted(topics))
    tokens = tokenizer.encode(text[: MAX_TOKEN_CHARACTERS * arguments.length * arguments.pieces])
    begins = range(0, min(len(tokens) - 1, arguments.length * arguments.pieces), arguments.length)
    documents = [tokens[begin : begin + arguments.length] for begin in begins]
    original = read(model, documents)
    rows = {16: {"perplexity": round(math.exp(original.loss), 3), "same_best_token": 1.0}}
    with tempfile.TemporaryDirectory() as folder:
        for bits in (8, 4):
            pack(str(model), bits, Path(folder) / str(bits))
            packed = read(Path(folder) / str(bits), documents)
            same = float((packed.best == original.best).float().mean())
            rows[bits] = {"perplexity": round(math.exp(packed.loss), 3), "same_best_token": round(same, 4)}
    for bits, row in rows.items():
        print(f"{bits:2} bits: perplexity {row['perplexity']:8.3f}, same best token {row['same_best_token']:.2%}")
    source = str(arguments.text or f"Python {platform.python_version()}")
    print(json.dumps({"model": model.name, "text": source, "num_tokens": sum(map(len, documents)), "bits": rows}))


if __name__ == "__main__":
    main()
